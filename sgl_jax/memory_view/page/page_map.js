/** The map of one pool of one rank: a cell a page, painted only where pages changed. */

import { fit, setSlider, watch } from "./canvas.js";
import { count, element, plural } from "./format.js";
import { HOST_KINDS, KINDS, VERMILION, kindOf, theme } from "./palette.js";

const CELL_SIZES = [24, 18, 12, 9, 6, 3];
const TEXELS = 3; // along an edge of a cell, before scaling
const FLASH_MS = 500;
const MAX_ZOOM = 16;
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

/** The grid with the largest cells that fit; cells of 3 pixels may be higher than `maxHeight`. */
export function gridOf(numPages, width, maxHeight = 400) {
  for (const cell of CELL_SIZES) {
    const columns = Math.max(1, Math.min(numPages, Math.floor(width / cell)));
    const rows = Math.ceil(numPages / columns);
    if (rows * cell <= maxHeight || cell === CELL_SIZES.at(-1)) return { cell, columns, rows };
  }
}

/** Neighbouring rows of cells with changes, [first, last], of ascending `pages`. */
export function dirtyRows(pages, columns) {
  const bands = [];
  for (const page of pages) {
    const row = Math.floor(page / columns);
    const band = bands.at(-1);
    if (band && row <= band[1] + 1) band[1] = row;
    else bands.push([row, row]);
  }
  return bands;
}

export class PageMap {
  #view = { zoom: 1, x: 0, y: 0 }; // x, y: the upper left corner in pixels of the whole map
  #flashes = []; // {since, pages}
  #isStale = true;
  #canvas = element("canvas", { tabIndex: 0, role: "slider", ariaValueMin: 0 });
  #seen;
  cursor = -1;
  outlined = 0; // a row: its pages have an outline
  defects = []; // pages
  isHost = false; // the pages are blocks in host memory

  /** `on.point(page or null)` and `on.pin(page)` follow pointer and keys. */
  constructor(dpRank, on) {
    this.dpRank = dpRank;
    this.on = on;
    this.root = element("figure", { data: { rank: dpRank } },
      element("figcaption", {}, `Rank ${dpRank}`), this.#canvas);
    this.#canvas.ariaLabel = `Page of rank ${dpRank}`;
    this.#seen = watch(this.root, () => (this.#isStale = true));
    this.#listen();
  }

  /** Paints the pages whose code or kind differs from the painted one. */
  update(codes, isIdle, { isHost, outlined, defects }) {
    this.isHost = isHost;
    const isNew = this.#fitGrid(codes.length);
    const changed = [];
    const { shown, kinds } = this;
    for (let page = 0; page < codes.length; page++) {
      const code = codes[page];
      const kind = kindOf(code, isIdle);
      if (kind === kinds[page] && code === shown[page]) continue;
      shown[page] = code;
      kinds[page] = kind;
      this.#paintCell(page, kind);
      changed.push(page);
    }
    for (const [first, last] of dirtyRows(changed, this.grid.columns)) {
      const [y, height] = [first * TEXELS, (last - first + 1) * TEXELS];
      this.texture.putImageData(this.image, 0, 0, 0, y, this.image.width, height);
    }
    if (changed.length && !isNew && !stillness.matches) {
      this.#flashes.push({ since: performance.now(), pages: changed });
    }
    const hadMarks = this.#hasMarks;
    this.outlined = outlined;
    this.defects = defects;
    this.#describe();
    this.#isStale ||= changed.length > 0 || hadMarks || this.#hasMarks;
  }

  /** Paints every cell again, in other colours. */
  repaint() {
    this.grid = null;
  }

  /** Kind and row, or transfer, of a page's owner, in words. */
  ownerOf(page) {
    const code = this.shown[page];
    const [kinds, holder] = this.isHost ? [HOST_KINDS, "transfer"] : [KINDS, "row"];
    return kinds[this.kinds[page]].name + (code > 0 ? `, ${holder} ${code}` : "");
  }

  wordsOf(page) {
    return `${this.#noun} ${count(page)}, ${this.ownerOf(page)}`;
  }

  /** Zooms around a point of the canvas, the cursor if none is given. */
  zoomBy(factor, [x, y] = this.#cursorPoint()) {
    const view = this.#view;
    const zoom = Math.min(MAX_ZOOM, Math.max(1, view.zoom * factor));
    view.x += x / view.zoom - x / zoom;
    view.y += y / view.zoom - y / zoom;
    view.zoom = zoom;
    this.#pan(0, 0);
  }

  draw(now) {
    if (!(this.#isStale || this.#flashes.length) || !this.grid || !this.#seen.isVisible) return;
    this.#isStale = false;
    const { cell, columns, rows } = this.grid;
    const { zoom, x, y } = this.#view;
    const context = fit(this.#canvas, this.#width, this.#height);
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, this.#width, this.#height);
    context.scale(zoom, zoom);
    context.translate(-x, -y);
    context.drawImage(this.texture.canvas, 0, 0, columns * cell, rows * cell);
    if (this.#flashes.length) {
      this.#fadeFlashes(now);
      context.drawImage(this.heat.canvas, 0, 0, columns * cell, rows * cell);
    }
    this.#outline(context, this.#pagesOfRow(this.outlined), theme.ink, 1.5);
    this.#outline(context, this.defects, VERMILION, 2.5);
    if (this.cursor >= 0) this.#outline(context, [this.cursor], theme.ink, 2);
  }

  get #noun() {
    return this.isHost ? "block" : "page";
  }

  get #hasMarks() {
    return this.outlined > 0 || this.defects.length > 0;
  }

  get #width() {
    return this.grid.columns * this.grid.cell;
  }

  get #height() {
    return this.grid.rows * this.grid.cell;
  }

  /** Makes textures where the number of pages or the width changed; returns whether it did. */
  #fitGrid(numPages) {
    const grid = gridOf(numPages, this.root.clientWidth || 300);
    const isSame = this.grid?.columns === grid.columns && this.shown.length === numPages;
    if (isSame && this.grid.cell === grid.cell) return false;
    const { columns, rows } = (this.grid = grid);
    this.#view = { zoom: 1, x: 0, y: 0 };
    this.#flashes = [];
    this.#isStale = true;
    this.shown = new Int32Array(numPages);
    this.kinds = new Uint8Array(numPages).fill(255);
    this.texture = offscreen(columns * TEXELS, rows * TEXELS);
    this.image = this.texture.createImageData(columns * TEXELS, rows * TEXELS);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.heat = offscreen(columns, rows);
    this.heatImage = this.heat.createImageData(columns, rows);
    this.cursor = Math.min(this.cursor, numPages - 1);
    return true;
  }

  #paintCell(page, kind) {
    const { columns } = this.grid;
    const stride = columns * TEXELS;
    const first = Math.floor(page / columns) * TEXELS * stride + (page % columns) * TEXELS;
    const cell = theme.cells[kind];
    for (let texel = 0; texel < cell.length; texel++) {
      this.pixels[first + Math.floor(texel / TEXELS) * stride + (texel % TEXELS)] = cell[texel];
    }
  }

  /** A pixel of `heat` is a page, so that thousands of changes cost one picture. */
  #fadeFlashes(now) {
    const pixels = new Uint32Array(this.heatImage.data.buffer);
    const ink = parseInt(theme.ink.slice(1), 16); // a grey: the order of its bytes does not matter
    for (const { since, pages } of this.#flashes) {
      const left = Math.max(0, Math.min(1, 1 - (now - since) / FLASH_MS));
      const value = ((Math.round(200 * left) << 24) | ink) >>> 0;
      for (const page of pages) pixels[page] = value;
    }
    this.#flashes = this.#flashes.filter(({ since }) => now - since < FLASH_MS);
    this.#isStale ||= !this.#flashes.length;
    this.heat.putImageData(this.heatImage, 0, 0);
  }

  #pagesOfRow(row) {
    const pages = [];
    if (row > 0) this.shown.forEach((code, page) => code === row && pages.push(page));
    return pages;
  }

  #outline(context, pages, colour, width) {
    const { cell, columns } = this.grid;
    context.beginPath();
    for (const page of pages) {
      context.rect((page % columns) * cell, Math.floor(page / columns) * cell, cell, cell);
    }
    context.strokeStyle = colour;
    context.lineWidth = width / this.#view.zoom;
    context.stroke();
  }

  #pan(dx, dy) {
    const view = this.#view;
    const limit = 1 - 1 / view.zoom;
    view.x = Math.min(this.#width * limit, Math.max(0, view.x + dx / view.zoom));
    view.y = Math.min(this.#height * limit, Math.max(0, view.y + dy / view.zoom));
    this.#canvas.classList.toggle("zoomed", view.zoom > 1);
    this.#isStale = true;
  }

  #pageAt({ offsetX, offsetY }) {
    const { cell, columns } = this.grid;
    const { zoom, x, y } = this.#view;
    const column = Math.floor((x + offsetX / zoom) / cell);
    const page = Math.floor((y + offsetY / zoom) / cell) * columns + column;
    return column >= 0 && column < columns && page >= 0 && page < this.shown.length ? page : null;
  }

  #moveCursor(page) {
    this.cursor = Math.min(this.shown.length - 1, Math.max(0, page));
    const { cell, columns } = this.grid;
    const { zoom, x, y } = this.#view;
    const left = ((this.cursor % columns) * cell - x) * zoom;
    const top = (Math.floor(this.cursor / columns) * cell - y) * zoom;
    const size = cell * zoom;
    this.#pan(
      Math.min(0, left) + Math.max(0, left + size - this.#width),
      Math.min(0, top) + Math.max(0, top + size - this.#height),
    );
    this.#describe();
    this.on.point(this.cursor);
  }

  #describe() {
    const last = this.shown.length - 1;
    const words = this.cursor < 0 ? plural(last + 1, this.#noun) : this.wordsOf(this.cursor);
    setSlider(this.#canvas, this.cursor, last, words);
  }

  #listen() {
    const canvas = this.#canvas;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, distance: 0 };
      if (this.#view.zoom > 1) canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag && event.buttons) {
        const [dx, dy] = [drag.x - event.clientX, drag.y - event.clientY];
        drag = { x: event.clientX, y: event.clientY, distance: drag.distance + Math.hypot(dx, dy) };
        this.#pan(dx, dy);
      } else if (this.grid) this.on.point(this.#pageAt(event));
    });
    canvas.addEventListener("pointerleave", () => this.on.point(null));
    canvas.addEventListener("click", (event) => {
      const page = this.#pageAt(event);
      if ((drag?.distance ?? 0) > 4 || page === null) return;
      this.#moveCursor(page);
      this.on.pin(page);
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoomBy(2 ** (-event.deltaY / 200), [event.offsetX, event.offsetY]);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #onKey(event) {
    if (!this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const { columns } = this.grid;
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns,
      PageUp: -10 * columns, PageDown: 10 * columns, Home: -Infinity, End: Infinity,
    };
    const step = steps[event.key];
    if (event.shiftKey && event.key.startsWith("Arrow")) {
      const [dx, dy] = Math.abs(step) === 1 ? [40 * step, 0] : [0, 40 * Math.sign(step)];
      this.#pan(dx, dy);
    } else if (step !== undefined) this.#moveCursor(this.cursor < 0 ? 0 : this.cursor + step);
    else if (event.key === "+" || event.key === "=") this.zoomBy(2);
    else if (event.key === "-") this.zoomBy(0.5);
    else if (event.key === "0") this.zoomBy(0);
    else if (event.key === "Enter" && this.cursor >= 0) this.on.pin(this.cursor);
    else return;
    event.preventDefault();
  }

  #cursorPoint() {
    if (this.cursor < 0) return [this.#width / 2, this.#height / 2];
    const { cell, columns } = this.grid;
    const { zoom, x, y } = this.#view;
    const [column, row] = [this.cursor % columns, Math.floor(this.cursor / columns)];
    return [((column + 0.5) * cell - x) * zoom, ((row + 0.5) * cell - y) * zoom];
  }
}

function offscreen(width, height) {
  return Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
}
