/** The one stream of events of the page (`GET /api/v1/events`), and what it has told so far. */
import { AGAIN_MS, identify, isReached, urlOf, who } from "./api.js";
import { batch, effect, signal, useEffect } from "./lib.js";
import { text } from "./text.js";
import { toast } from "./toasts.js";

/** @typedef {{at_us: number, level: string, event: string, fields: Record<string, any>, node?: string}} Note */
/** @typedef {{number: number, node: string, at_us: number, ready?: boolean, obstacles?: string[],
 *   clients?: {connected: number, disconnected: number, notes: Note[]}, log?: Note[],
 *   leaders?: Record<string, string>, in_sync?: Record<string, string[]>, nodes?: Record<string, string>,
 *   rates?: Record<string, number>, drops?: Record<string, number>}} Batch */
/** @typedef {{at_us: number, rates: Record<string, number>, obstacles: string[]}} NodeState */

/** The newest rates and obstacles of each node.
 * @type {import("./vendor/signals.js").Signal<Record<string, NodeState>>} */
export const nodes = signal({});
/** The nodes of the cluster by state, as they are told: up, down, draining, removed.
 * @type {import("./vendor/signals.js").Signal<Record<string, string>>} */
export const states = signal({});
/** The newest lines of the nodes' logs, the newest first.
 * @type {import("./vendor/signals.js").Signal<Note[]>} */
export const notes = signal([]);
/** Rates of all nodes together, second by second: [seconds since 1970, rates].
 * @type {import("./vendor/signals.js").Signal<[number, Record<string, number>][]>} */
export const rates = signal([]);
/** Whether the stream is open. */
export const isLive = signal(false);

const NOTES_MAX = 200;
const RATES_MAX = 300;
/** @type {Set<(batch: Batch) => void>} */
const listeners = new Set();
/** @type {EventSource | null} */
let source = null;
let wasLive = false;

/** Call a function with each batch while a component is shown. @param {(batch: Batch) => void} listener */
export function useEvents(listener) {
  useEffect(() => {
    listeners.add(listener);
    return () => void listeners.delete(listener);
  });
}

/** @param {Batch} found */
function take(found) {
  const node = found.node;
  batch(() => {
    const known = nodes.value[node] || { at_us: 0, rates: {}, obstacles: [] };
    const next = { at_us: found.at_us, rates: found.rates ?? known.rates, obstacles: found.obstacles ?? known.obstacles };
    nodes.value = { ...nodes.value, [node]: next };
    const lines = [...(found.log || []), ...(found.clients?.notes || [])].map((each) => ({ ...each, node }));
    if (lines.length) {
      lines.sort((a, b) => b.at_us - a.at_us);
      notes.value = [...lines, ...notes.value].slice(0, NOTES_MAX);
    }
    for (const [name, state] of Object.entries(found.nodes || {})) {
      if (states.value[name] === state) continue;
      if (states.value[name]) toast(text.nodeIs(name, state), state === "up" ? "good" : "bad");
      states.value = { ...states.value, [name]: state };
    }
    if (found.rates) addRates(found);
  });
  for (const listener of listeners) listener(found);
}

/** @param {Batch} found */
function addRates(found) {
  const second = Math.floor(found.at_us / 1e6);
  const sum = /** @type {Record<string, number>} */ ({});
  for (const [node, each] of Object.entries(nodes.value)) {
    // A node that is silent for longer has no rate, and one that is down has no clients.
    if (found.at_us - each.at_us > 5e6 || ["down", "removed"].includes(states.value[node])) continue;
    for (const [name, value] of Object.entries(each.rates)) sum[name] = (sum[name] || 0) + value;
  }
  const before = rates.value.filter(([at]) => at < second);
  rates.value = [...before, /** @type {[number, typeof sum]} */ ([second, sum])].slice(-RATES_MAX);
}

function open() {
  if (source || !who.value?.role || !isReached.value || document.hidden) return;
  const stream = new EventSource(urlOf("events"));
  source = stream;
  stream.onopen = () => {
    isLive.value = isReached.value = true;
    if (wasLive) toast(text.liveAgain);
    wasLive = true;
  };
  stream.onmessage = (event) => take(JSON.parse(event.data));
  stream.onerror = () => {
    close();
    // The stream does not say why it ended. A request does: the broker is away, or the login ended.
    identify();
    setTimeout(open, AGAIN_MS);
  };
}

function close() {
  source?.close();
  source = null;
  isLive.value = false;
}

/** Keep the stream open while somebody is logged in and looks. A hidden page costs nothing. */
export function follow() {
  effect(() => {
    if (who.value?.role && isReached.value) open();
    else close();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) return open();
    wasLive = false;
    close();
  });
}
