/** The route. The fragment of the URL is the state of a screen: `#/log?filter=plant/%23&kind=message`.
 * A screen reads its parameters from `route` and changes them with `go` or `change`, so that every
 * view can be linked, and the back button works. */
import { signal } from "./lib.js";

/** @typedef {Record<string, string>} Params */
/** @typedef {{path: string, params: Params}} Route */
/** @typedef {Record<string, string | number | boolean | null | undefined>} Given */

/** @returns {Route} */
function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { path, params: Object.fromEntries(new URLSearchParams(query || "")) };
}

/** The present route. */
export const route = signal(read());
addEventListener("hashchange", () => (route.value = read()));

/** The URL of a screen. Empty parameters are left out.
 * @param {string} path @param {Given} [params] */
export function link(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== "" && value != null && value !== false) query.set(name, String(value));
  }
  return `#/${path}${query.size ? "?" + query : ""}`;
}

/** Go to a screen.
 * @param {string} path @param {Given} [params] @param {boolean} [replace] without an entry in the
 * history, for changes that come quickly */
export function go(path, params = {}, replace = false) {
  const url = link(path, params);
  if (url === location.hash) return;
  if (replace) {
    history.replaceState(null, "", url);
    route.value = read();
  } else location.hash = url;
}

/** Change some parameters of the present screen. null removes one.
 * @param {Given} params @param {boolean} [replace] */
export function change(params, replace = false) {
  go(route.value.path, { ...route.value.params, ...params }, replace);
}
