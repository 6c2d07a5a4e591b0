// Tables that sort and filter, explanations by tap: without it a page is only less handy.
// Columns: a name for each cell where a row is shown as a card, and a button on each heading to sort by.
const leading = text => { const found = text.replaceAll(",", "").match(/^[+−-]?\d+(\.\d+)?(e[+-]?\d+)?/); return found ? Number(found[0]) : NaN; };
for (const table of document.querySelectorAll("table.cards, table.sortable")) {
  const headings = [...table.querySelectorAll("thead th")], body = table.tBodies[0];
  if (table.matches(".cards")) for (const row of table.rows) {
    let column = 0;
    for (const cell of row.cells) {
      if (column && cell.colSpan === 1) cell.dataset.label = headings[column].textContent.trim();
      column += cell.colSpan;
    }
  }
  if (!table.matches(".sortable") || body.rows.length < 2) continue;
  headings.forEach((heading, column) => {
    if (!heading.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending", rows = [...body.rows];
      const keys = new Map(rows.map(row => { const cell = row.cells[column]; return [row, cell?.dataset.sort ?? cell?.textContent.trim() ?? ""]; }));
      const numbers = [...keys.values()].every(key => key === "" || !isNaN(leading(key)));
      rows.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
        return (up ? 1 : -1) * (numbers ? leading(x) - leading(y) : x.localeCompare(y));
      });
      body.append(...rows);
      headings.forEach(other => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
  if (body.rows.length > 12 || table.dataset.filter) filter(table);
}

// Names of modules and nodes may be broken behind dots and slashes, numbers may not.
for (const cell of document.querySelectorAll("tbody code, tbody th")) for (const node of [...cell.childNodes])
  if (node.nodeType === 3) {
    const parts = node.data.split(/(?<=(?<!\d)[./])(?=\w)|(?<=[./])(?=[A-Za-z_])/);
    node.replaceWith(...parts.flatMap((part, at) => at ? [document.createElement("wbr"), part] : [part]));
  }

function filter(table) {
  const input = document.createElement("input"), count = document.createElement("span"), line = document.createElement("p");
  input.type = "search";
  input.className = "filter";
  input.placeholder = input.ariaLabel = `Filter ${table.dataset.filter ?? "rows"}`;
  count.className = "soft small";
  count.setAttribute("role", "status");
  line.append(input, " ", count);
  table.closest(".wide").before(line);
  input.addEventListener("input", () => {
    const asked = input.value.toLowerCase(), rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(asked);
    count.textContent = asked ? `${rows.filter(row => !row.hidden).length} of ${rows.length}` : "";
  });
}

// Explanations: `data-tip` is shown by pointer, tap and keyboard; arrows go on within a grid, Escape hides.
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);
const hide = () => { tip.hidden = true; document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby"); };
function explain(on) {
  hide();
  tip.textContent = on.dataset.tip;
  tip.hidden = false;
  on.setAttribute("aria-describedby", "tip");
  const box = on.getBoundingClientRect(), width = document.documentElement.clientWidth;
  const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.left = `${scrollX + Math.max(8, Math.min(box.left, width - tip.offsetWidth - 8))}px`;
  tip.style.top = `${scrollY + (below ? box.bottom + 6 : box.top - tip.offsetHeight - 6)}px`;
}
for (const grid of document.querySelectorAll(".grid")) {
  const cells = [...grid.querySelectorAll("[data-tip]")];
  cells.forEach((cell, place) => { cell.tabIndex = place ? -1 : 0; });
  grid.addEventListener("keydown", event => {
    const at = event.target.closest("[data-tip]"), step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!at || !step) return;
    const next = grid.rows[at.parentElement.rowIndex + step[0]]?.cells[at.cellIndex + step[1]];
    if (!next?.dataset.tip) return;
    event.preventDefault();
    at.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
for (const [event, action] of [["pointerover", explain], ["focusin", explain], ["click", explain], ["pointerout", hide], ["focusout", hide]])
  document.addEventListener(event, ({ target, pointerType }) => {
    const on = target.closest?.("[data-tip]");
    if (on && !(event.startsWith("pointer") && pointerType === "touch")) action(on);
    else if (event === "click") hide();
  });
document.addEventListener("keydown", event => event.key === "Escape" && hide());

// What scrolls inside its box is reached by keyboard.
function reach() {
  for (const box of document.querySelectorAll(".wide, pre")) {
    const scrolls = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
    const heading = box.closest("section")?.querySelector("h2")?.textContent.trim() ?? "table";
    for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", heading]])
      if (scrolls) box.setAttribute(name, value); else box.removeAttribute(name);
  }
}
reach();
addEventListener("resize", reach);
addEventListener("toggle", reach, true);
