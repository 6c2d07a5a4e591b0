// Tables that sort by a click on a heading, and filters that hide rows; without it a page is only less handy.
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((heading, column) => heading.querySelector("button")?.addEventListener("click", () => {
    const up = heading.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
    const key = row => { const cell = row.cells[column]; return cell.dataset.sort ?? cell.textContent.trim(); };
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
      const numbers = !isNaN(x) && !isNaN(y);
      return (up ? 1 : -1) * (numbers ? x - y : x.localeCompare(y));
    };
    body.append(...[...body.rows].sort(order));
    table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  }));
}
for (const input of document.querySelectorAll("input.filter")) {
  const table = document.getElementById(input.dataset.table), count = document.querySelector(`[data-count="${input.dataset.table}"]`);
  input.addEventListener("input", () => {
    const asked = input.value.toLowerCase(), rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(asked);
    count.textContent = asked ? `${rows.filter(row => !row.hidden).length} of ${rows.length}` : "";
  });
}
