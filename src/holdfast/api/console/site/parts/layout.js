/** Places for the nodes of a graph, by springs: links pull their ends together, and all nodes push each
 * other away (Fruchterman and Reingold, 1991). The same graph always gets the same places. */

/** @typedef {{id: string, x: number, y: number}} Placed */

/** Places in a box of `width` and `height`, `edge` away from its border. A round looks at all pairs, so
 * large graphs get fewer rounds.
 * @param {string[]} ids @param {[string, string][]} links @param {number} width @param {number} height @param {[number, number]} edge
 * @returns {Map<string, Placed>} */
export function place(ids, links, width, height, edge) {
  const size = ids.length, far = Math.sqrt((width * height) / Math.max(1, size));
  const nodes = ids.map((id, at) => ({ id, x: width * Math.cos((2 * Math.PI * at) / size), y: height * Math.sin((2 * Math.PI * at) / size), dx: 0, dy: 0 }));
  const found = new Map(nodes.map((each) => [each.id, each]));
  const pairs = links.map(([a, b]) => [found.get(a), found.get(b)]);
  const rounds = Math.min(300, 20 + Math.ceil(5e6 / (1 + size * size)));
  /** @param {any} a @param {any} b @param {(distance: number) => number} force away from each other */
  const move = (a, b, force) => {
    const x = a.x - b.x || 0.01, y = a.y - b.y || 0.01, distance = Math.sqrt(x * x + y * y), by = force(distance) / distance;
    a.dx += x * by, a.dy += y * by, b.dx -= x * by, b.dy -= y * by;
  };
  for (let round = 0; round < rounds; round += 1) {
    for (let a = 0; a < size; a += 1) for (let b = 0; b < a; b += 1) move(nodes[a], nodes[b], (distance) => (far * far) / distance);
    for (const [a, b] of pairs) move(a, b, (distance) => -(distance * distance) / far);
    const step = far * (1 - round / rounds);
    for (const each of nodes) {
      const long = Math.sqrt(each.dx ** 2 + each.dy ** 2) || 1, by = Math.min(long, step) / long;
      each.x += each.dx * by, each.y += each.dy * by, each.dx = each.dy = 0;
    }
  }
  for (const [axis, wide, border] of /** @type {["x" | "y", number, number][]} */ ([["x", width, edge[0]], ["y", height, edge[1]]])) {
    const low = Math.min(...nodes.map((each) => each[axis])), span = Math.max(...nodes.map((each) => each[axis])) - low;
    for (const each of nodes) each[axis] = span < 1 ? wide / 2 : border + ((each[axis] - low) / span) * (wide - 2 * border);
  }
  return found;
}
