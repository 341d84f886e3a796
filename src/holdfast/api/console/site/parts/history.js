/** What the nodes of a cluster remember of the last minutes, merged, and its story in words. */
import { count, duration, time } from "../format.js";
import { text } from "../text.js";

const own = text.timeline;
const S = 1e6;
const KEPT_US = 660 * S;
const COLUMNS = ["published_per_s", "acknowledge_p99_ms", "refused", "waiting", "waits_ms"];

/** @typedef {{from: number, to: number | null, value: string}} Piece @typedef {[number, number]} Span */

/** The merged history. What a node has told stays when it dies: its own memory is gone then. */
export class History {
  constructor() {
    this.version = 0;
    this.now = 0;
    /** @type {any[]} */
    this.missing = [];
    /** @type {Map<number, any>} */
    this.steps = new Map();
    /** @type {Map<string, any>} */
    this.notes = new Map();
    /** @type {Map<string, {started: number[], at: number[], columns: Record<string, (number | null)[]>}>} */
    this.nodes = new Map();
  }

  /** The time since which something may be missing here. Nodes reply a moment apart. */
  get since() {
    return this.missing.length ? Math.max(0, this.now - 30 * S) : Math.max(0, this.now - 3 * S);
  }

  /** Add a reply of `GET /api/v1/timeline`. @param {any} reply */
  add(reply) {
    const back = this.missing.length > reply.missing.length;
    this.now = Math.max(this.now, reply.now_us);
    this.missing = reply.missing;
    for (const step of reply.steps) this.steps.set(step.version, step);
    for (const part of reply.nodes) {
      for (const note of part.notes) this.notes.set(`${part.node}/${note.at_us}/${note.event}/${note.fields.node || ""}`, { ...note, by: part.node });
      const kept = this.nodes.get(part.node) || { started: [], at: [], columns: Object.fromEntries(COLUMNS.map((each) => [each, []])) };
      this.nodes.set(part.node, kept);
      if (!kept.started.includes(part.started_us)) kept.started.push(part.started_us);
      const last = kept.at.at(-1) || 0, figures = part.figures;
      figures.at_us.forEach((/** @type {number} */ at, /** @type {number} */ index) => {
        if (at <= last) return;
        kept.at.push(at);
        for (const name of COLUMNS) kept.columns[name].push(figures[name][index]);
      });
      const old = kept.at.findIndex((at) => at > this.now - KEPT_US);
      for (const each of [kept.at, ...Object.values(kept.columns)]) each.splice(0, Math.max(0, old));
    }
    if (back) for (const note of this.notes.values()) if (note.at_us < this.now - KEPT_US) this.notes.delete(note);
    this.version += 1;
  }

  /** The steps in their order. */
  get ordered() {
    return [...this.steps.values()].sort((a, b) => a.version - b.version);
  }

  /** The lanes of the picture. @param {any} cluster the present state, null without a cluster */
  lanes(cluster) {
    const steps = this.ordered;
    const gone = new Set(steps.flatMap((step) => step.nodes.filter((/** @type {any} */ each) => each.after === "removed").map((/** @type {any} */ each) => each.node)));
    const names = [...new Set([...this.nodes.keys(), ...(cluster?.nodes || []).map((/** @type {any} */ each) => each.node)])].filter((name) => !gone.has(name) || this.nodes.has(name)).sort();
    const notes = [...this.notes.values()].sort((a, b) => a.at_us - b.at_us);
    /** @type {Record<string, Piece[]>} */
    const nodes = {};
    for (const name of names) nodes[name] = this.nodeLane(name, steps, notes, cluster);
    const size = cluster?.partitions.length || 0;
    const partitions = Array.from({ length: size }, (_, number) => partitionLane(number, steps, cluster.partitions[number]));
    /** @type {Piece[]} */
    const metadata = [];
    for (const note of notes.filter((each) => each.event === "metadata_leader")) {
      const leader = note.fields.leader, last = metadata.at(-1);
      if (!leader || last?.value === leader) continue;
      if (last) last.to = note.at_us;
      metadata.push({ from: note.at_us, to: null, value: leader });
    }
    if (!metadata.length && cluster?.metadata_leader) metadata.push({ from: 0, to: null, value: cluster.metadata_leader });
    return { names, nodes, partitions, metadata, notes, steps, figures: this.figures.bind(this) };
  }

  /** @param {string} name @param {any[]} steps @param {any[]} notes @param {any} cluster @returns {Piece[]} */
  nodeLane(name, steps, notes, cluster) {
    const marks = /** @type {[number, string][]} */ ([]);
    for (const step of steps) for (const each of step.nodes) if (each.node === name) marks.push([step.at_us, each.after]);
    for (const note of notes) {
      if (note.fields.node !== name) continue;
      if (note.event === "node_suspected") marks.push([note.at_us, "suspected"]);
      if (note.event === "node_heard_again") marks.push([note.at_us, "heard"]);
    }
    marks.sort((a, b) => a[0] - b[0]);
    const first = steps.flatMap((step) => step.nodes).find((each) => each.node === name)?.before;
    const present = cluster?.nodes.find((/** @type {any} */ each) => each.node === name)?.state || "up";
    let state = first ?? present;
    const began = Math.min(...(this.nodes.get(name)?.started || [0]));
    /** @type {Piece[]} */
    const pieces = [{ from: first === "" || !steps.length ? began : 0, to: null, value: state || "up" }];
    for (const [at, next] of marks) {
      const last = /** @type {Piece} */ (pieces.at(-1));
      if (next !== "suspected" && next !== "heard") state = next;
      const value = next === "suspected" && state === "up" ? "suspected" : state;
      if (value === last.value) continue;
      last.to = at;
      pieces.push({ from: at, to: null, value });
    }
    return pieces.filter((piece) => piece.value && piece.value !== "removed");
  }

  /** A column of a node in a span. @param {string} node @param {string} column @param {Span} span */
  figures(node, column, span) {
    const kept = this.nodes.get(node);
    if (!kept) return { t: [], v: [] };
    const first = kept.at.findIndex((at) => at >= span[0]);
    let last = kept.at.findIndex((at) => at > span[1]);
    if (last < 0) last = kept.at.length;
    return first < 0 ? { t: [], v: [] } : { t: kept.at.slice(first, last), v: kept.columns[column].slice(first, last) };
  }
}

/** @param {number} number @param {any[]} steps @param {any} present */
function partitionLane(number, steps, present) {
  const own = steps.flatMap((step) => step.partitions.filter((/** @type {any} */ each) => each.partition === number).map((/** @type {any} */ each) => ({ at: step.at_us, ...each })));
  const pieces = [{ from: 0, to: /** @type {number | null} */ (null), leader: own.length ? own[0].leader_before : present.leader, epoch: own.length ? 0 : present.epoch, sync: own.length ? own[0].in_sync_before : present.in_sync }];
  /** @type {{from: number, to: number | null, leader: string, epoch: number}[]} */
  const leads = [{ ...pieces[0] }];
  for (const each of own) {
    /** @type {any} */ (pieces.at(-1)).to = each.at;
    const last = /** @type {any} */ (leads.at(-1));
    if (last.leader !== each.leader_after) {
      last.to = each.at;
      leads.push({ from: each.at, to: null, leader: each.leader_after, epoch: each.epoch });
    }
    pieces.push({ from: each.at, to: null, leader: each.leader_after, epoch: each.epoch, sync: each.in_sync_after });
  }
  return { leads, sync: pieces };
}

/** @param {any[]} items @param {(item: any) => string} key @returns {[string, any[]][]} */
function grouped(items, key) {
  /** @type {Map<string, any[]>} */
  const found = new Map();
  for (const item of items) found.set(key(item), [...(found.get(key(item)) || []), item]);
  return [...found].sort(([a], [b]) => a < b ? -1 : 1);
}

/** What happened in a span, in words.
 * @param {History} history @param {any} lanes @param {Span} span @param {any} cluster */
export function story(history, lanes, span, cluster) {
  const within = (/** @type {number} */ at) => at >= span[0] && at <= span[1];
  const steps = lanes.steps.filter((/** @type {any} */ step) => within(step.at_us));
  const notes = lanes.notes.filter((/** @type {any} */ note) => within(note.at_us));
  /** @type {{at: number, text: string, kind: string}[]} */
  const found = [];
  const seen = new Set();
  for (const note of notes) {
    const node = note.fields.node;
    if (note.event === "node_suspected") {
      found.push({ at: note.at_us, kind: "warn", text: own.missed(note.by, node, note.fields.reason) });
      seen.add(node);
    } else if (note.event === "metadata_leader" && note.fields.leader === note.by) found.push({ at: note.at_us, kind: "", text: own.elected(note.by) });
    else if (note.event.startsWith("disk_")) found.push({ at: note.at_us, kind: note.level === "error" ? "bad" : "good", text: own.disk(note.by, note.event.replace(/_/g, " ")) });
  }
  /** @type {Map<string, {at: number, sign: number, node: string, left: number, those: any[]}>} */
  const sets = new Map();
  for (const step of steps) {
    for (const each of step.nodes) found.push({ at: step.at_us, kind: each.after === "up" ? "good" : each.after === "down" ? "bad" : "", text: own.became(each.node, each.before, each.after) });
    const moved = step.partitions.filter((/** @type {any} */ each) => each.leader_after !== each.leader_before);
    for (const [key, those] of grouped(moved, (each) => `${each.leader_before}\n${each.leader_after}`)) {
      const [from, to] = key.split("\n");
      found.push({ at: step.at_us, kind: to ? "" : "bad", text: own.moved(numbers(those), those.length, from, to) });
    }
    for (const each of step.partitions) {
      const sign = Math.sign(each.in_sync_after.length - each.in_sync_before.length), left = each.in_sync_after.length;
      if (!sign) continue;
      const [more, less] = sign > 0 ? [each.in_sync_after, each.in_sync_before] : [each.in_sync_before, each.in_sync_after];
      const node = more.filter((/** @type {string} */ name) => !less.includes(name)).join(", ");
      const key = `${sign}${node}\n${left}`, known = sets.get(key);
      // Leaders report one by one that a node has caught up: that is one event to a reader.
      if (known && step.at_us - known.at < S) known.those.push(each);
      else {
        if (known) sets.set(key + known.at, known);
        sets.set(key, { at: step.at_us, sign, node, left, those: [each] });
      }
    }
  }
  for (const { at, sign, node, left, those } of sets.values()) {
    those.sort((a, b) => a.partition - b.partition);
    found.push({ at, kind: sign > 0 ? "good" : left < (cluster?.min_insync || 1) ? "bad" : "warn", text: own[sign > 0 ? "joined" : "lost"](node, numbers(those), those.length, left) });
  }
  found.sort((a, b) => a.at - b.at);
  const refused = total(history, lanes, span, "refused"), waits = most(history, lanes, span, "waits_ms"), waiting = most(history, lanes, span, "waiting");
  if (found.length) {
    if (waits > 150) found.push({ at: span[1], kind: "warn", text: own.waited(count(waiting), duration(waits / 1000)) });
    found.push({ at: span[1], kind: refused ? "bad" : "good", text: refused ? own.refused(count(refused)) : own.noneRefused });
  }
  const zero = found.find((each) => each.kind === "warn" || each.kind === "bad")?.at ?? found[0]?.at;
  const lines = found.map((each) => ({ ...each, at: time(each.at, true), when: each.at === span[1] ? "" : each.at === zero ? time(each.at, true) : `${each.at < zero ? "−" : "+"}${fine(Math.abs(each.at - zero) / S)}` }));
  return { lines, ...headline(steps, notes, refused, waits, cluster) };
}

/** The last failure of the span in one sentence. @param {any[]} steps @param {any[]} notes @param {number} refused @param {number} waits @param {any} cluster */
function headline(steps, notes, refused, waits, cluster) {
  const fall = steps.findLast((step) => step.nodes.some((/** @type {any} */ each) => each.after === "down"));
  if (!fall) return cluster ? { kind: "good", head: own.quiet, sub: "" } : { kind: "good", head: own.alone, sub: "" };
  const node = fall.nodes.find((/** @type {any} */ each) => each.after === "down").node;
  const missed = notes.filter((note) => note.event === "node_suspected" && note.fields.node === node && note.at_us <= fall.at_us + S).at(-1);
  const began = notes.find((note) => missed && note.event === "node_suspected" && note.fields.node === node && note.at_us > missed.at_us - 5 * S)?.at_us || fall.at_us;
  const moves = steps.filter((step) => step.at_us >= fall.at_us && step.partitions.some((/** @type {any} */ each) => each.leader_before === node && each.leader_after));
  const many = moves.reduce((sum, step) => sum + step.partitions.filter((/** @type {any} */ each) => each.leader_before === node && each.leader_after).length, 0);
  const back = steps.find((step) => step.at_us > fall.at_us && step.nodes.some((/** @type {any} */ each) => each.node === node && each.after === "up"));
  const head = moves.length ? own.took(node, time(began), many, duration((moves[0].at_us - began) / S)) : own.fell(node, time(began));
  const sub = [refused ? own.refused(count(refused)) : own.noneRefused, waits > 150 ? own.longest(duration(waits / 1000)) : "", back ? own.back(node, fine((back.at_us - fall.at_us) / S)) : own.stillAway(node)];
  return { kind: refused ? "bad" : back ? "good" : "warn", head, sub: sub.filter(Boolean).join(" ") };
}

/** 12.3 s @param {number} seconds */
const fine = (seconds) => (seconds < 1 || seconds >= 60 ? duration(seconds) : `${seconds.toFixed(1)} s`);

/** @param {any[]} those */
function numbers(those) {
  const all = those.map((each) => each.partition);
  return all.length > 8 ? `${all.slice(0, 7).join(", ")} …` : all.join(", ") + ".";
}

/** @param {History} history @param {any} lanes @param {Span} span @param {string} column */
const values = (history, lanes, span, column) => lanes.names.flatMap((/** @type {string} */ node) => history.figures(node, column, span).v.map((value) => value || 0));
/** @param {History} history @param {any} lanes @param {Span} span @param {string} column */
const total = (history, lanes, span, column) => values(history, lanes, span, column).reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
/** @param {History} history @param {any} lanes @param {Span} span @param {string} column */
const most = (history, lanes, span, column) => Math.max(0, ...values(history, lanes, span, column));
