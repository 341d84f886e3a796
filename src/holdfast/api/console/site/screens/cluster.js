/** The cluster: its nodes, every partition on every node, and operations with their plan. */
import { get, may, post } from "../api.js";
import { useEvents } from "../events.js";
import { bytes, count } from "../format.js";
import { html, useState } from "../lib.js";
import { useLoad } from "../load.js";
import { Badge, Card, Facts, Head, State } from "../parts/basics.js";
import { Drawer, ask } from "../parts/drawer.js";
import { Table } from "../parts/table.js";
import { change, link, route } from "../router.js";
import { text } from "../text.js";
import { attempt, toast } from "../toasts.js";

const own = text.cluster;
export const path = "cluster";
export const title = own.title;
export const scope = "viewer";

/** @typedef {any} Partition @typedef {any} Node */
const SHOWN = 64;

/** The class of a node's colour: the same on all screens. @param {string} node @param {string[]} names sorted */
export const hue = (node, names) => `n${(names.indexOf(node) % 6) + 1}`;

/** What the state of the cluster means, in sentences. @param {any} found @returns {["good" | "warn" | "bad", string[]]} */
export function verdict(found) {
  const bad = [], warn = [];
  if (!found.has_majority) bad.push(own.noMajority);
  if (found.leaderless) bad.push(own.leaderless(found.leaderless));
  if (found.below_min_insync) bad.push(own.below(found.below_min_insync, found.min_insync));
  for (const each of found.nodes) {
    if (each.state !== "up") warn.push(text.nodeIs(each.node, each.state));
    else if (each.suspected) warn.push(own.suspected(each.node));
    else if (each.through) warn.push(own.through(each.node, each.through));
  }
  if (found.replication?.waits_for) warn.push(found.replication.waits_for + ".");
  else if (found.under_replicated) warn.push(own.under(found.under_replicated, found.replication_factor));
  if (bad.length) return ["bad", [...bad, ...warn]];
  return warn.length ? ["warn", found.below_min_insync ? warn : [...warn, own.safe]] : ["good", [own.healthy(found.replication_factor)]];
}

/** Ask with the plan of an operation, then carry it out. @param {string} action @param {string} [node] */
async function operate(action, node = "") {
  await attempt(async () => {
    const plan = await get("cluster/plan", { action, node });
    const name = own.actions[/** @type {"drain"} */ (action)](node);
    if (!plan.possible) return toast(plan.reason, "bad");
    const wanted = await ask({ title: name + "?", action: name, danger: action === "remove", body: html`<${Plan} plan=${plan} />` });
    if (wanted && await attempt(() => post(`/cluster/${action}`, { node }), own.begun(name))) return undefined;
  });
}

/** @param {{plan: any}} props */
function Plan({ plan }) {
  const arrow = (/** @type {string} */ a, /** @type {string} */ b) => a === b ? a || "–" : html`${a || "–"} → <b>${b || "–"}</b>`;
  return html`<p>${own.plan(plan.leaders_moved, plan.copies, bytes(plan.bytes))}</p>
    <p class="note">${own.leads(Object.entries(plan.leaders).map(([node, many]) => `${node} ${many}`).join(", "))}</p>
    ${plan.partitions.length > 0 && html`<div class="limited"><${Table} label=${own.planned} rows=${plan.partitions.slice(0, 200)} rowKey=${(/** @type {any} */ row) => row.partition} columns=${[
      { key: "p", title: own.partition, cell: (/** @type {any} */ row) => row.partition },
      { key: "l", title: own.leader, cell: (/** @type {any} */ row) => arrow(row.leader, row.next_leader) },
      { key: "r", title: own.replicas, cell: (/** @type {any} */ row) => arrow(row.replicas.join(" "), row.next_replicas.join(" ")) }]} /></div>`}`;
}

/** What a node is to a partition. @param {Partition} row @param {string} node */
const part = (row, node) => row.leader === node ? "leader" : row.in_sync.includes(node) ? "insync"
  : row.replicas.includes(node) || row.adding.includes(node) ? "behind" : "absent";

export function component() {
  const [chosen, setChosen] = [route.value.params.partition, (/** @type {any} */ partition) => change({ partition })];
  const [all, setAll] = useState(false);
  const status = useLoad("cluster", {}, { every: 3 });
  const replicas = useLoad(status.data ? "cluster/replicas" : null, {}, { every: 3 });
  useEvents((batch) => void ((batch.leaders || batch.in_sync || batch.nodes) && status.reload()));
  const found = status.data;
  if (!found) return html`<${Head} title=${title} /><${State} of=${status} />`;
  const names = found.nodes.map((/** @type {Node} */ each) => each.node);
  const led = new Map((replicas.data?.partitions || []).map((/** @type {any} */ each) => [each.partition, each]));
  const up = new Set(found.nodes.filter((/** @type {Node} */ each) => each.state === "up").map((/** @type {Node} */ each) => each.node));
  const lag = (/** @type {Partition} */ row, /** @type {string} */ node) => up.has(node) ? /** @type {any} */ (led.get(row.partition))?.lags[node] : null;
  const odd = found.partitions.filter((/** @type {Partition} */ row) => row.in_sync.length < row.replicas.length || !row.leader || row.adding.length || row.leader !== row.replicas[0]);
  const many = found.partitions.length > SHOWN && !all;
  const rows = many ? [...odd, ...found.partitions.filter((/** @type {Partition} */ row) => !odd.includes(row))].slice(0, SHOWN) : found.partitions;
  const cell = (/** @type {Partition} */ row, /** @type {string} */ node) => {
    const is = part(row, node), behind = lag(row, node);
    return html`<span class=${`seat ${is} ${hue(node, names)}`} role="img" aria-label=${own.parts[/** @type {"leader"} */ (is)]}
      ></span>${is === "behind" ? html` <span class="note">${behind == null ? own.away : "−" + count(behind)}</span>` : null}`;
  };
  const [kind, sentences] = verdict(found);
  const open = chosen && found.partitions[Number(chosen)];
  return html`<${Head} title=${title} note=${own.note(found.nodes.length, found.partitions.length, found.replication_factor, found.min_insync)}>
      <a class="button" href=${link("timeline")}>${own.past}</a>
      ${may("operator") && html`<button onClick=${() => operate("rebalance")}>${own.actions.rebalance()}</button>`}<//>
    <${State} of=${status} /><div class=${"health " + kind} role="status">${sentences.map((each) => html`<p>${each}</p>`)}</div>
    <div class="figures wide">${found.nodes.map((/** @type {Node} */ node) => html`<${NodeCard} key=${node.node} node=${node} found=${found} names=${names} />`)}</div>
    <${Card} title=${own.grid} aside=${html`<span class="legend">${["leader", "insync", "behind", "absent"].map((is) => html`<span><span class=${`seat ${is} n1`}></span>${own.parts[/** @type {"leader"} */ (is)]}</span>`)}</span>`}>
      <div class="split"><div><${Table} label=${own.grid} rows=${rows} rowKey=${(/** @type {Partition} */ row) => row.partition}
        onRow=${(/** @type {Partition} */ row) => setChosen(row.partition)} isChosen=${(/** @type {Partition} */ row) => String(row.partition) === chosen}
        note=${many && own.some(SHOWN, found.partitions.length)} more=${many ? () => setAll(true) : null}
        columns=${[{ key: "p", title: own.partition, cell: (/** @type {Partition} */ row) => row.partition },
          ...names.map((/** @type {string} */ node) => ({ key: "n" + node, title: node, cell: (/** @type {Partition} */ row) => cell(row, node) })),
          { key: "e", title: own.epoch, align: "right", minor: true, cell: (/** @type {Partition} */ row) => row.epoch },
          { key: "h", title: own.committed, align: "right", minor: true, cell: (/** @type {Partition} */ row) => count(row.high_watermark) }]} /></div>
        ${open && html`<${Drawer} title=${own.partitionOf(chosen)} onClose=${() => setChosen(null)}><${About} row=${open} led=${led.get(open.partition)} found=${found} /><//>`}</div><//>`;
}

/** @param {{node: Node, found: any, names: string[]}} props */
function NodeCard({ node, found, names }) {
  const name = node.node;
  const kind = node.state === "up" ? (node.suspected ? "warn" : "good") : node.state === "down" ? "bad" : "info";
  const trouble = ["disk_full", "disk_stalled", "disk_damaged", "leaving"].filter((each) => node[each]);
  const run = (/** @type {string} */ action) => () => operate(action, name);
  return html`<section class="card node"><h2><span class=${"seat leader " + hue(name, names)}></span>${name} <${Badge} kind=${kind}>${node.suspected && node.state === "up" ? own.isSuspected : node.state}<//>
      ${found.metadata_leader === name && html`<${Badge} title=${own.metadataNote}>${own.metadata}<//>`}
      ${trouble.map((each) => html`<${Badge} kind="bad">${each.replace("_", " ")}<//>`)}</h2>
    <${Facts} rows=${[[own.leads1, count(node.leaders)], [own.replicas, `${node.in_sync} / ${node.replicas} ${own.inSync}`],
      [own.zone, node.zone], [own.address, node.client_address], [own.clock, Math.abs(node.clock_skew_s) >= 0.05 ? `${node.clock_skew_s} s` : null]]} />
    ${may("operator") && html`<div class="buttons">${node.state === "draining"
      ? html`<button onClick=${run("undrain")}>${own.undrain}</button>` : html`<button onClick=${run("drain")}>${own.drain}</button>`}
      ${may("admin") && node.state !== "up" && html`<button class="danger" onClick=${run("remove")}>${own.remove}</button>`}</div>`}</section>`;
}

/** @param {{row: Partition, led: any, found: any}} props */
function About({ row, led, found }) {
  const why = !row.leader ? own.whyNone(row.in_sync.join(", ")) : row.leader === row.replicas[0] ? own.whyPreferred : own.whyNot(row.replicas[0],
    found.nodes.find((/** @type {Node} */ each) => each.node === row.replicas[0])?.state, row.in_sync.includes(row.replicas[0]));
  return html`<p>${why}</p><${Facts} rows=${[[own.leader, row.leader || own.parts.absent], [own.epoch, row.epoch], [own.replicas, row.replicas.join(", ")],
    [own.adding, row.adding.join(", ")], [own.inSyncSet, row.in_sync.join(", ")], [own.committed, count(row.high_watermark)],
    [own.first, led && count(led.start_offset)], [own.end, led && count(led.end_offset)], [own.version, row.version],
    ...Object.entries(led?.lags || {}).map(([node, many]) => /** @type {[any, any]} */ ([own.lagOf(node), count(/** @type {number} */ (many))]))]} />
    <p><a href=${link("log", { partition: row.partition })}>${own.toLog}</a></p>`;
}
