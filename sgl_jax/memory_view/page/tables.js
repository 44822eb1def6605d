/** Tables beside the drawings, for screen readers and for everybody on demand. */

import { byId, element, setText } from "./format.js";

const INTERVAL_MS = 1000;
const MAX_ROWS = 100;

/** Hidden from sight until its button is pressed. Rewritten at most once a second, and never while
 * the focus, the pointer or a selection is in it. */
export class LiveTable {
  #body = element("tbody");
  #note = element("p", { className: "quiet" });
  #updatedAt = -Infinity;
  #version = 0;

  /** `rowsOf(state, limit)` returns up to `limit` rows of cells and optionally more. */
  constructor(sectionId, caption, headings, rowsOf, { isOpen = false } = {}) {
    this.rowsOf = rowsOf;
    const cells = headings.map((words) => element("th", { scope: "col" }, words));
    const head = element("thead", {}, element("tr", {}, ...cells));
    this.root = element("div", { className: "table", role: "region", ariaLabel: caption },
      element("table", {}, element("caption", {}, caption), head, this.#body),
      this.#note);
    byId(sectionId).append(this.root);
    if (isOpen) {
      this.root.tabIndex = 0;
      return;
    }
    const button = element("button", { type: "button", className: "table-toggle" }, "Table");
    button.ariaLabel = `Table: ${caption}`;
    button.addEventListener("click", () => this.#toggle(button));
    this.#toggle(button);
    byId(sectionId).querySelector("h2").after(button);
  }

  /** `version` grows with each change of what is shown. */
  update(state, now, version) {
    if (version === this.#version || now - this.#updatedAt < INTERVAL_MS) return;
    this.#updatedAt = now;
    if (this.#isBeingRead()) return;
    this.#version = version;
    const rows = this.rowsOf(state, MAX_ROWS + 1);
    const listed = rows.slice(0, MAX_ROWS);
    while (this.#body.rows.length > listed.length) this.#body.lastChild.remove();
    listed.forEach((cells, index) => {
      writeRow(this.#body.rows[index] ?? this.#addRow(cells.length), cells);
    });
    setText(this.#note, rows.length > MAX_ROWS ? `Only the first ${MAX_ROWS} are listed.` : "");
  }

  #toggle(button) {
    const isHidden = this.root.classList.toggle("visually-hidden");
    button.ariaExpanded = !isHidden;
    if (isHidden) this.root.removeAttribute("tabindex");
    else this.root.tabIndex = 0;
  }

  #isBeingRead() {
    const { anchorNode, isCollapsed } = getSelection();
    return this.root.contains(document.activeElement) || this.root.matches(":hover") ||
      (!isCollapsed && this.root.contains(anchorNode));
  }

  #addRow(length) {
    const row = this.#body.insertRow();
    row.append(element("th", { scope: "row" }));
    while (row.cells.length < length) row.insertCell();
    return row;
  }
}

function writeRow(row, cells) {
  cells.forEach((cell, index) => setText(row.cells[index], String(cell ?? "–")));
}
