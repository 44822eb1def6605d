/** Texts of numbers, and elements whose content is always text, never markup. */

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);

export const rate = (number) => (number < 100 ? tenths : whole).format(number);

/** 3725.4 seconds: "1:02:05". */
export function clockTime(seconds) {
  const total = Math.max(0, Math.floor(seconds));
  const twoDigits = (value) => String(value).padStart(2, "0");
  const minutes = Math.floor(total / 60) % 60;
  return `${Math.floor(total / 3600)}:${twoDigits(minutes)}:${twoDigits(total % 60)}`;
}

/** 95 seconds: "1 min 35 s". */
export function duration(seconds) {
  if (seconds < 60) return `${tenths.format(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${whole.format(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** [3, 4, 5, 9]: "3–5, 9". */
export function pageRanges(pages) {
  const ranges = [];
  for (const page of pages) {
    const last = ranges.at(-1);
    if (last && page === last[1] + 1) last[1] = page;
    else ranges.push([page, page]);
  }
  return ranges
    .map(([first, last]) => (first === last ? count(first) : `${count(first)}–${count(last)}`))
    .join(", ");
}

export const byId = (id) => document.getElementById(id);

/** A new element; `data` are its data attributes, `children` elements or texts. */
export function element(tag, { className = "", data = {}, ...properties } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  Object.assign(made.dataset, data);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

/** Writes only texts that differ, so that an unchanged table costs no layout. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Shows a number and keeps it readable for programs in `data-value`. */
export function setNumber(target, number, words = count(number)) {
  target.dataset.value = number;
  setText(target, words);
}
