/** Places of a session's turns in its picture. */

const MAX_STUBS = 3;

/** A point {column, lane, parent, isShared} for each turn, branches of undone turns (`stubs`:
 * {column, lane, words}) and the number of lanes. Columns are places in the line of turns. */
export function layoutTurns(session) {
  const { turns, undone, forked_from: source, num_left_out: before } = session;
  const points = [];
  const hasChild = new Set();
  let lanes = 0;
  turns.forEach((turn, index) => {
    const parent = points[turn.parent];
    const continues = parent && !hasChild.has(turn.parent);
    hasChild.add(turn.parent);
    points.push({
      column: parent ? parent.column + 1 : 0,
      lane: continues ? parent.lane : lanes++,
      parent,
      isShared: source !== null && before + index < source.num_turns,
    });
  });
  const byPlace = groupBy(undone, (each) => each.after_turns);
  const stubs = [...byPlace].slice(-MAX_STUBS).map(([afterTurns, rollbacks]) => ({
    column: Math.max(-1, afterTurns - before - 1),
    lane: lanes++,
    words: `${rollbacks.map((each) => each.num_turns).join(" + ")} undone`,
  }));
  return { points, stubs, lanes: Math.max(1, lanes) };
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return groups;
}

/** Sessions with forks right below their source, if that is listed; each with its `depth`. */
export function familyOrder(sessions) {
  const ids = new Set(sessions.map((session) => session.session_id));
  const forks = groupBy(sessions, ({ session_id: id, forked_from: source }) =>
    source && source.session_id !== id && ids.has(source.session_id) ? source.session_id : null,
  );
  const ordered = [];
  const add = (parent, depth) => {
    for (const session of forks.get(parent) ?? []) {
      ordered.push({ ...session, depth });
      add(session.session_id, depth + 1);
    }
  };
  add(null, 0);
  return ordered;
}
