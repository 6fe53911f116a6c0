"use strict";
// The page is complete without this script, which adds sorting and a filter. The URL keeps their state.
(() => {
  const units = { "B": 1, "KiB": 1024, "MiB": 1024 ** 2, "GiB": 1024 ** 3, "TiB": 1024 ** 4 };
  const keyOf = (cell) => {
    const text = cell ? cell.textContent.trim() : "";
    const match = text.replace(/[\u202f,\s](?=\d{3}\b)/g, "").match(/^[^\d\w–-]*([-+]?\d+(?:\.\d+)?)\s*(\w*)/);
    if (!match) return text === "–" || text === "" ? null : text.toLowerCase();
    const value = parseFloat(match[1]) * (units[match[2]] || 1);
    return text.endsWith(" slower") ? 1 / value : value;
  };
  const compare = (a, b, down) => {
    if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  };
  const sort = (table, column, down) => {
    const rows = [...table.tBodies[0].rows];
    rows.forEach((row, i) => { if (!row.dataset.first) row.dataset.first = i + 1; });
    const keyed = rows.map((row) => [column < 0 ? +row.dataset.first : keyOf(row.cells[column]), row]);
    keyed.sort((x, y) => compare(x[0], y[0], down));
    table.tBodies[0].append(...keyed.map((pair) => pair[1]));
    [...table.tHead.rows[0].cells].forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  };
  document.querySelectorAll("main table").forEach((table) => {
    if (table.tBodies[0].rows.length < 2) return;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        sort(table, column, head.getAttribute("aria-sort") === "ascending");
        table.dispatchEvent(new Event("sorted"));
      });
    });
  });
  document.querySelectorAll("form.filter").forEach((form) => {
    const name = form.dataset.for;
    const table = document.getElementById(name + "-table");
    const rows = [...table.tBodies[0].rows];
    form.hidden = false;
    const show = () => {
      const words = form.q.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      rows.forEach((row) => {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word)) ||
          (form.verdict.value !== "" && row.dataset.tag !== form.verdict.value);
        if (!row.hidden) count += 1;
      });
      form.querySelector("output").textContent = count + " of " + rows.length + " cases";
      const printNote = table.parentElement.parentElement.querySelector(".on-paper.cut");
      if (printNote) {
        printNote.hidden = count <= 100;
        printNote.querySelector("span").textContent = count;
      }
    };
    const keep = () => {
      const state = new URLSearchParams();
      if (form.q.value) state.set("q", form.q.value);
      if (form.verdict.value) state.set("verdict", form.verdict.value);
      const head = table.querySelector("th[aria-sort]");
      if (head) state.set("sort", (head.ariaSort === "descending" ? "-" : "") + head.cellIndex);
      const text = state.toString();
      history.replaceState(null, "", "#" + name + (text ? "?" + text : ""));
    };
    const restore = () => {
      const [target, text] = location.hash.slice(1).split(/\?(.*)/s);
      if (target === name) {
        const state = new URLSearchParams(text || "");
        form.q.value = state.get("q") || "";
        const verdict = state.get("verdict") || "";
        form.verdict.value = [...form.verdict.options].some((o) => o.value === verdict) ? verdict : "";
        const order = (state.get("sort") || "").match(/^(-?)(\d{1,2})$/);
        if (order && +order[2] < table.tHead.rows[0].cells.length) sort(table, +order[2], order[1] === "-");
        else sort(table, -1, false);
        document.getElementById(name).scrollIntoView();
      } else if (rows.some((row) => row.id === target)) {
        form.q.value = form.verdict.value = "";
      }
      show();
    };
    form.addEventListener("input", () => { show(); keep(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    table.addEventListener("sorted", keep);
    window.addEventListener("hashchange", restore);
    restore();
  });
})();
