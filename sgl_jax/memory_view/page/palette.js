/** The six kinds of pages: names, colours (Okabe and Ito's) and patterns, so that no kind is told
 * from another by colour alone. */

/** `cell` are the nine pixels of a page: "#" its colour, "o" the surface, "." an empty cell. */
export const KINDS = [
  kind("free", "free", "", null, "... ... ..."),
  kind("leased", "running", "held by a request", "#0072b2", "### ### ###"),
  kind("cached_evictable", "cached", "reusable until evicted", "#009e73", "### #.# ###"),
  kind("cached_protected", "protected", "cached and in use", "#009e73", "o## #o# ##o"),
  kind("session_held", "sessions", "kept for an idle session", "#e69f00", "### ooo ###"),
  kind("reserved", "reserved", "never given out", "#cc79a7", "o#o #o# o#o"),
];
const HOST_NAMES = {
  leased: ["arriving", "a transfer writes it"],
  cached_protected: ["leaving", "cached, and a transfer reads it"],
  session_held: [], // none
};
/** The same kinds with their names for blocks in host memory. */
export const HOST_KINDS = KINDS.map((each) => {
  const [name, meaning] = HOST_NAMES[each.state] ?? [each.name, each.meaning];
  return { ...each, name, meaning };
});
export const [FREE, RUNNING, CACHED, PROTECTED, SESSION, RESERVED] = KINDS.keys();

export const VERMILION = "#d55e00";
export const BLUE = "#0072b2";

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];

/** Colours of the scheme in use. */
export const theme = {};

/** Calls `listener` now and at each change between light and dark. */
export function onTheme(listener) {
  listeners.push(listener);
  listener();
}

function kind(state, name, meaning, colour, cell) {
  return { state, name, meaning, colour, cell };
}

/** The kind of a page, from its code in a frame; `isIdle[row]` marks rows of idle sessions. */
export function kindOf(code, isIdle) {
  if (code > 0) return isIdle[code] ? SESSION : RUNNING;
  return code === 0 ? FREE : code === -1 ? RESERVED : code === -2 ? CACHED : PROTECTED;
}

function updateTheme() {
  Object.assign(
    theme,
    darkScheme.matches
      ? { ink: "#f2f2f2", quiet: "#b4b4b4", surface: "#16181b", line: "#3d4147", empty: "#2b2e33" }
      : { ink: "#1a1a1a", quiet: "#595959", surface: "#ffffff", line: "#cfd3d8", empty: "#e7e9ec" },
  );
  theme.cells = KINDS.map(cellPixels);
  theme.tiles = KINDS.map(cellTile);
  theme.tiles.forEach((tile, kind) =>
    document.documentElement.style.setProperty(
      `--fill-${KINDS[kind].state}`, `url(${tile.toDataURL()})`),
  );
}

/** Nine pixels of a cell, row by row, as little-endian RGBA. */
function cellPixels({ colour, cell }) {
  const colours = { ".": theme.empty, "#": colour, o: theme.surface };
  return Uint32Array.from(cell.replaceAll(" ", ""), (mark) => rgba(colours[mark]));
}

function rgba(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

/** A small canvas with one cell at twice its size, for patterns. */
function cellTile(_, kind) {
  const small = Object.assign(document.createElement("canvas"), { width: 3, height: 3 });
  const image = new ImageData(new Uint8ClampedArray(theme.cells[kind].buffer.slice(0)), 3, 3);
  small.getContext("2d").putImageData(image, 0, 0);
  const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
  const context = tile.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, 6, 6);
  return tile;
}

export const pattern = (context, kind) => context.createPattern(theme.tiles[kind], "repeat");

darkScheme.addEventListener("change", () => {
  updateTheme();
  for (const listener of listeners) listener();
});
updateTheme();
