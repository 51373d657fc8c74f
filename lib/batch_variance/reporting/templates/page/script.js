"use strict";
// Tables sort by a click, or Enter, on a column's head, and links open folded ones. Without this script they are tables all
// the same.
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
  // A link into a folded table opens it.
  const unfold = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (const fold of target.closest("main, body").querySelectorAll("details"))
      if (fold === target || fold.contains(target) || target.contains(fold) && fold.classList.contains("data")) fold.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  document.addEventListener("click", event => {  // the same link again changes no hash
    const link = event.target.closest("a.source");
    if (link && link.hash === location.hash) unfold();
  });
  if (location.hash) unfold();
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
