"use strict";
const $ = (id) => document.getElementById(id);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// An example value of a schema: its references are followed.
function example(schema, schemas, name = "text") {
  if (schema.$ref) return example(schemas[schema.$ref.split("/").pop()], schemas, name);
  if (schema.default !== undefined) return schema.default;
  if (schema.anyOf) return example(schema.anyOf[0], schemas, name);
  if (schema.enum) return schema.enum[0];
  if (schema.prefixItems) return schema.prefixItems.map((each) => example(each, schemas, name));
  if (schema.type === "array") return [example(schema.items ?? {}, schemas, name)];
  if (schema.type === "object") {
    const fields = Object.entries(schema.properties ?? { name: schema.additionalProperties ?? {} });
    return Object.fromEntries(fields.map(([key, each]) => [key, example(each, schemas, key)]));
  }
  return { string: name, integer: 0, number: 0.5, boolean: false }[schema.type] ?? null;
}

function block(title, schema, schemas, card) {
  card.append(element("h2", title), element("pre", JSON.stringify(example(schema, schemas), null, 2)));
}

async function main() {
  const told = await (await fetch("/openapi.json")).json();
  const schemas = told.components.schemas;
  document.title = $("name").textContent = told.info.title;
  for (const [path, methods] of Object.entries(told.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const card = element("section", undefined, "path");
      card.append(element("p", `${method.toUpperCase()} ${path}`, "big"));
      card.append(element("p", operation.summary));
      if (operation.description) card.append(element("p", operation.description, "quiet"));
      if (operation.requestBody) {
        const schema = operation.requestBody.content["application/json"].schema;
        block("Request", schema, schemas, card);
        block("Answer", operation.responses["200"].content["application/json"].schema, schemas, card);
        const body = JSON.stringify(example(schema, schemas));
        card.append(element("h2", "With curl"));
        card.append(element("pre", `curl ${location.origin}${path} -H 'content-type: application/json' \\\n  -d '${body}'`));
        const table = element("table");
        for (const [status, answer] of Object.entries(operation.responses)) {
          const row = element("tr");
          row.append(element("td", status), element("td", answer.description));
          table.append(row);
        }
        card.append(element("h2", "Statuses"), table);
      }
      $("paths").append(card);
    }
  }
}

main().catch((error) => { $("paths").textContent = error.message; });
