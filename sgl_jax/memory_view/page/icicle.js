/** Places of nodes in the picture of a prefix tree. */

/** Pages of each node and all below it, by id. Nodes come parents first. */
export function subtreePages(nodes) {
  const totals = new Map(nodes.map((node) => [node.id, node.num_pages[0]]));
  for (const { id, parent } of nodes.toReversed()) {
    if (totals.has(parent)) totals.set(parent, totals.get(parent) + totals.get(id));
  }
  return totals;
}

/** Rectangles {node, left, width, top, height} in parts of the whole picture: left to right by
 * pages, top to bottom by tokens. With `focus`, an id, only that node and all below it. */
export function layoutIcicle(nodes, focus = null) {
  const totals = subtreePages(nodes);
  const placed = [];
  const ends = new Map(); // of a node's last child: where the next one starts
  const lefts = new Map();
  let wholePages = 0;
  for (const node of nodes) {
    const isTop = focus === null ? !lefts.has(node.parent) : node.id === focus;
    if (!isTop && !lefts.has(node.parent)) continue;
    const parent = isTop ? null : node.parent;
    const left = ends.get(parent) ?? lefts.get(parent) ?? 0;
    lefts.set(node.id, left);
    ends.set(parent, left + totals.get(node.id));
    if (isTop) wholePages += totals.get(node.id);
    placed.push({ node, left, width: totals.get(node.id) });
  }
  const first = placed.length ? Math.min(...placed.map(({ node }) => node.start)) : 0;
  const tokens = Math.max(1, ...placed.map(({ node }) => node.end)) - first || 1;
  return placed.map(({ node, left, width }) => ({
    node,
    left: left / Math.max(1, wholePages),
    width: width / Math.max(1, wholePages),
    top: (node.start - first) / tokens,
    height: (node.end - node.start) / tokens,
  }));
}
