"use strict";
// Tables sort by a click, or Enter, on a column's head. Without this script they are tables all the same.
(() => {
  const number = text => {
    const plain = text.replace(/[,\s]/g, "").replace(/%$/, "");
    return plain === "" ? NaN : Number(plain);
  };
  const spoken = cell => {
    const words = cell.cloneNode(true);
    words.querySelectorAll("[aria-hidden]").forEach(mark => mark.remove());
    return words.textContent.trim();
  };
  const sorted = (rows, column, down) => {
    const texts = new Map(rows.map(row => [row, spoken(row.cells[column])]));
    const empty = text => text === "" || text === "–";
    const numeric = [...texts.values()].every(text => empty(text) || !Number.isNaN(number(text)));
    const compare = (a, b) => numeric ? number(a) - number(b) : a.localeCompare(b, "en", { numeric: true });
    return rows.sort((a, b) => {
      const [x, y] = [texts.get(a), texts.get(b)];
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      return down ? compare(y, x) : compare(x, y);
    });
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = table.tHead && table.tHead.rows.length === 1 ? [...table.tHead.rows[0].cells] : [];
    const body = table.tBodies[0];
    if (!body || body.rows.length < 2 || ![...body.rows].every(row => row.cells.length === heads.length)) continue;
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...sorted([...body.rows], column, down));
      });
    });
  }
})();
