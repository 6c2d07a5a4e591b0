"use strict";
// Every text goes in as textContent: nothing that a model, a class or a visitor says becomes markup.
const $ = (id) => document.getElementById(id);
const NAMES = (int8) => ({ engine: int8 ? "INT8 engine" : "engine", fp32: "FP32" });

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// What each endpoint asks for: fields by id with their labels, and the request that they make.
const FORMS = {
  predict: (columns) =>
    columns.length === 2
      ? { fields: columns, request: (v) => ({ pairs: [[v[0], v[1]]] }) }
      : { fields: columns, request: (v) => ({ texts: [v[0]] }) },
  embed: () => ({ fields: ["text"], request: (v) => ({ texts: [v[0]] }) }),
  rank: () => ({
    fields: ["query", "passages, one a line"],
    request: (v) => ({ query: v[0], passages: v[1].split("\n").filter((line) => line.trim()) }),
  }),
  tokens: () => ({
    fields: ["sentence, words apart"],
    request: (v) => ({ sentences: [v[0].split(/\s+/).filter(Boolean)] }),
  }),
  qa: () => ({
    fields: ["question", "context"],
    request: (v) => ({ questions: [{ question: v[0], context: v[1] }] }),
  }),
};

const number = (value) => (Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(4));

const SHOWN = {
  predict(answer, side) {
    side.append(element("p", answer.label ?? number(answer.score), "big"));
    for (const [name, share] of Object.entries(answer.scores ?? {})) {
      const row = element("div", undefined, "row");
      const meter = element("meter");
      meter.value = share;
      meter.setAttribute("aria-label", name);
      row.append(element("span", name), meter, element("span", (100 * share).toFixed(2) + " %"));
      side.append(row);
    }
  },
  embed(answer, side) {
    side.append(element("p", `${answer.embedding.length} numbers`, "big"));
    side.append(element("pre", answer.embedding.slice(0, 8).map(number).join(", ") + ", …"));
  },
  rank(answer, side, request, place) {
    side.append(element("p", `${place + 1}. (${number(answer.score)}) ${request.passages[answer.index]}`));
  },
  tokens(answer, side, request) {
    request.sentences[0].forEach((word, place) => {
      const label = answer.labels[place];
      const tag = element("span", word, label && label !== "O" ? "tag named" : "tag");
      if (label && label !== "O") tag.append(" ", element("small", label));
      side.append(tag);
    });
  },
  qa(answer, side) {
    side.append(element("p", answer.answer || "no answer", "big"));
  },
};

function norm(values) {
  return Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));
}

// One sentence on how the two agree.
const VERDICTS = {
  predict(a, b) {
    if (a.label === undefined) return [`The scores differ by ${number(Math.abs(a.score - b.score))}.`, true];
    const far = Math.max(...Object.keys(a.scores).map((name) => Math.abs(a.scores[name] - b.scores[name])));
    const told = `the probabilities differ by at most ${(100 * far).toFixed(2)} points`;
    return a.label === b.label ? [`Same class; ${told}.`, true] : [`Another class: ${told}.`, false];
  },
  embed(a, b) {
    const dot = a.embedding.reduce((sum, value, place) => sum + value * b.embedding[place], 0);
    return [`Cosine of both: ${(dot / (norm(a.embedding) * norm(b.embedding))).toFixed(5)}.`, true];
  },
  rank(a, b, all) {
    const order = (answers) => answers.map((each) => each.index).join(" ");
    const same = order(all[0]) === order(all[1]);
    return [same ? "Same order." : "Another order.", same];
  },
  tokens(a, b) {
    const other = a.labels.filter((label, place) => label !== b.labels[place]).length;
    return [other ? `${other} of ${a.labels.length} words have another class.` : "Same classes.", !other];
  },
  qa(a, b) {
    return a.answer === b.answer ? ["Same answer.", true] : ["Another answer.", false];
  },
};

async function ask(path, request, model) {
  const start = performance.now();
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...request, model }),
  });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `status ${answer.status}`);
  return { answers: body.answers, ms: performance.now() - start };
}

async function main() {
  const about = await (await fetch("/v1/model")).json();
  const name = about.endpoint.split("/").pop();
  const form = FORMS[name](about.columns);
  document.title = $("name").textContent = about.name;
  $("about").textContent = `${about.kind} · ${about.recipe} · ${about.engine} · ${about.max_length} tokens`;
  if (about.models.length < 2) $("send").textContent = "Ask";
  form.fields.forEach((label, place) => {
    const field = element("textarea");
    field.id = `field-${place}`;
    field.required = true;
    const title = element("label", label);
    title.htmlFor = field.id;
    $("fields").append(title, field);
  });
  $("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const request = form.request(form.fields.map((_, place) => $(`field-${place}`).value));
    $("send").disabled = true;
    $("state").textContent = "…";
    $("answers").replaceChildren();
    $("verdict").textContent = "";
    try {
      const found = [];
      // one after the other: at once they would share the processor, and neither time would be its own
      for (const model of about.models) {
        const { answers, ms } = await ask(about.endpoint, request, model);
        const side = element("article", undefined, "side");
        side.append(element("h2", NAMES(about.int8)[model]));
        answers.forEach((answer, place) => SHOWN[name](answer, side, request, place));
        const cut = answers.some((answer) => answer.truncated) ? ", cut off" : "";
        side.append(element("p", `${answers[0].tokens} tokens${cut}, ${ms.toFixed(1)} ms there and back`, "quiet"));
        $("answers").append(side);
        found.push(answers);
      }
      if (found.length === 2) {
        const [text, good] = VERDICTS[name](found[0][0], found[1][0], found);
        $("verdict").textContent = text;
        $("verdict").className = `verdict ${good ? "good" : "bad"}`;
      }
      $("state").textContent = "";
    } catch (error) {
      $("state").textContent = error.message;
    } finally {
      $("send").disabled = false;
    }
  });
}

main().catch((error) => { $("state").textContent = error.message; });
