// Pure functions of the page: `node --test` runs them, from test_page_modules.py.
import assert from "node:assert/strict";
import test from "node:test";

const page = new URL("../../sgl_jax/memory_view/page/", import.meta.url);
// What the modules look for in a browser when they are loaded.
const media = { matches: false, addEventListener() {} };
const context = { drawImage() {}, putImageData() {} };
const canvas = () => ({ getContext: () => context, toDataURL: () => "data:," });
Object.assign(globalThis, {
  matchMedia: () => media,
  ImageData: class {},
  document: { createElement: canvas, documentElement: { style: { setProperty() {} } } },
});
const load = (name) => import(new URL(name, page));

test("numbers, times and ranges in words", async () => {
  const { clockTime, count, duration, pageRanges, plural, rate } = await load("format.js");
  assert.equal(count(65536), "65,536");
  assert.equal(rate(3.14159), "3.1");
  assert.equal(rate(1234.6), "1,235");
  assert.equal(clockTime(3725.4), "1:02:05");
  assert.equal(duration(9.25), "9.3 s");
  assert.equal(duration(95), "1 min 35 s");
  assert.equal(duration(7320), "2 h 2 min");
  assert.equal(plural(1, "page"), "1 page");
  assert.equal(pageRanges([3, 4, 5, 9]), "3–5, 9");
});

test("cells are as large as fits, and 3 pixels at least", async () => {
  const { dirtyRows, gridOf } = await load("page_map.js");
  assert.deepEqual(gridOf(65536, 768), { cell: 3, columns: 256, rows: 256 });
  assert.deepEqual(gridOf(24, 1000), { cell: 24, columns: 24, rows: 1 });
  assert.equal(gridOf(65536, 340).cell, 3);
  assert.equal(gridOf(5, 1).columns, 1);
  assert.deepEqual(dirtyRows([0, 9, 10, 45, 46, 70], 10), [[0, 1], [4, 4], [7, 7]]);
});

test("a code and the idle rows give the kind of a page", async () => {
  const { CACHED, FREE, PROTECTED, RESERVED, RUNNING, SESSION, kindOf } = await load("palette.js");
  const isIdle = [];
  isIdle[7] = true;
  const kinds = [0, -1, -2, -3, 4, 7].map((code) => kindOf(code, isIdle));
  assert.deepEqual(kinds, [FREE, RESERVED, CACHED, PROTECTED, RUNNING, SESSION]);
  const { HOST_KINDS } = await load("palette.js");
  const names = kinds.map((kind) => HOST_KINDS[kind].name);
  assert.deepEqual(names, ["free", "reserved", "cached", "leaving", "arriving", undefined]);
});

test("runs of frames add up, and an instant replaces the numbers of the frame", async () => {
  const { State } = await load("state.js");
  const state = new State({ samples: [], is_recording: false });
  const frame = (time_s, runs) => ({
    time_s, marks: [{ kind: "retract" }],
    ranks: [{ dp_rank: 0, leases: [{ row: 2, is_idle: true }],
      pools: [{ num_pages: 5, pages: { free: time_s }, runs }] }],
  });
  state.add(frame(1, [[0, 1, -1], [1, 4, 0]]));
  state.add(frame(1.5, [[2, 2, 7]]));
  state.add(frame(2.5, [[3, 1, -3]]));
  state.show();
  assert.deepEqual([...state.codes[0][0]], [-1, 0, 7, -3, 0]);
  assert.deepEqual(state.samples.map((sample) => sample.marks.length), [1, 2]);
  assert.equal(state.pagesOf(0, 0).free, 2.5);
  state.instant = state.samples[0];
  assert.equal(state.pagesOf(0, 0).free, 1);
  assert.deepEqual(state.idleRows(0), [, , true]);
  state.freeze(true);
  state.add(frame(700, [[0, 5, -2]]));
  state.show();
  assert.deepEqual([...state.codes[0][0]], [-1, 0, 7, -3, 0]);
  state.freeze(false);
  state.show();
  assert.deepEqual([...state.codes[0][0]], [-2, -2, -2, -2, -2]);
  assert.equal(state.samples.length, 1);
});

test("events are read in any pieces", async () => {
  const { EventParser } = await load("api.js");
  const { backoff } = await load("stream.js");
  const text = ': alive\n\nevent: frame\ndata: {"a": 1}\n\nevent: tree\r\ndata: 2\r\n\r\nevent: fr';
  for (const size of [1, 3, 7, 100]) {
    const parser = new EventParser();
    const events = [];
    for (let at = 0; at < text.length; at += size) events.push(...parser.feed(text.slice(at, at + size)));
    assert.deepEqual(events, [{ name: "frame", data: '{"a": 1}' }, { name: "tree", data: "2" }]);
  }
  assert.deepEqual([0, 1, 2, 9].map(backoff), [1, 2, 4, 30]);
});

test("an icicle is as wide as its pages and as deep as its tokens", async () => {
  const { layoutIcicle } = await load("icicle.js");
  const node = (id, parent, start, end, pages) => ({ id, parent, start, end, num_pages: [pages] });
  const nodes = [node(1, null, 0, 40, 4), node(2, null, 0, 20, 2), node(3, 1, 40, 80, 1), node(4, 1, 40, 60, 3)];
  const places = (focus) => layoutIcicle(nodes, focus).map(
    ({ node: { id }, left, width, top, height }) => [id, left, width, top, height]);
  assert.deepEqual(places(null), [
    [1, 0, 0.8, 0, 0.5], [2, 0.8, 0.2, 0, 0.25], [3, 0, 0.1, 0.5, 0.5], [4, 0.1, 0.3, 0.5, 0.25],
  ]);
  assert.deepEqual(places(1).map(([id]) => id), [1, 3, 4]);
  assert.deepEqual(places(4), [[4, 0, 1, 0, 1]]);
  assert.deepEqual(layoutIcicle([]), []);
});

test("turns lie on a line; branches, rollbacks and forks leave it", async () => {
  const { familyOrder, layoutTurns } = await load("turns.js");
  const turns = [null, 0, 1, 0].map((parent) => ({ parent }));
  const session = { turns, undone: [], forked_from: null, num_left_out: 0 };
  const { points, lanes } = layoutTurns(session);
  assert.deepEqual(points.map(({ column, lane }) => [column, lane]), [[0, 0], [1, 0], [2, 0], [1, 1]]);
  assert.equal(lanes, 2);
  const undone = [{ after_turns: 2, num_turns: 1 }, { after_turns: 2, num_turns: 3 }];
  const forked = layoutTurns({ ...session, undone, forked_from: { session_id: "a", num_turns: 2 } });
  assert.deepEqual(forked.stubs, [{ column: 1, lane: 2, words: "1 + 3 undone" }]);
  assert.deepEqual(forked.points.map((point) => point.isShared), [true, true, false, false]);
  const sessions = [["b", "a"], ["a", null], ["c", "gone"], ["d", "b"]].map(([id, source]) => ({
    session_id: id, forked_from: source && { session_id: source },
  }));
  const order = familyOrder(sessions).map(({ session_id: id, depth }) => [id, depth]);
  assert.deepEqual(order, [["a", 0], ["b", 1], ["d", 2], ["c", 0]]);
});

test("the timeline shows the last sample of a pixel, and finds the nearest", async () => {
  const { nearest, samplesByPixel } = await load("timeline.js");
  const times = [0, 1, 2, 2.1, 10];
  const placeOf = (index) => times[index];
  const found = samplesByPixel(times, placeOf, 0, 10, 10).map(({ x, sample }) => [x, sample]);
  assert.deepEqual(found, [[0, 0], [1, 1], [2, 2.1], [10, 10]]);
  assert.deepEqual([-5, 0.4, 0.6, 7, 99].map((at) => nearest(5, placeOf, at)), [0, 0, 1, 4, 4]);
  assert.equal(nearest(0, placeOf, 3), -1);
});

test("a query is token ids or text", async () => {
  const { parseQuery } = await load("tree.js");
  assert.deepEqual(parseQuery("[1, 2,3]"), { input_ids: [1, 2, 3] });
  assert.deepEqual(parseQuery("1 apple"), { text: "1 apple" });
  assert.deepEqual(parseQuery(""), { text: "" });
});
