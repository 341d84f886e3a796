/** The state of a request for a component. */
import { ApiError, get, who } from "./api.js";
import { useEffect, useRef, useState } from "./lib.js";

/** @template T @typedef {{data: T | null, error: ApiError | null, loading: boolean, reload: () => void}} Loaded */

/** Load a route, and load it again when its parameters change, every `every` seconds, and when the
 * broker replies again after a failure or a login. Old data stays until there is new data.
 * @param {string | null} path null: nothing is loaded @param {Record<string, any>} [params]
 * @param {{every?: number}} [options] @returns {Loaded<any>} */
export function useLoad(path, params = {}, { every = 0 } = {}) {
  const [state, setState] = useState({ data: null, error: null, key: "" });
  const [round, setRound] = useState(0);
  const timer = useRef(0);
  const key = path === null ? "" : JSON.stringify([path, params]);
  const role = who.value?.role;
  useEffect(() => {
    if (path === null || !role) return undefined;
    const stop = new AbortController();
    get(path, params, stop.signal).then(
      (data) => again({ data, error: null, key }, every),
      (error) => {
        if (stop.signal.aborted) return;
        const old = state.key === key ? state.data : null;
        again({ data: old, error, key }, error.status === 0 || error.status === 503 ? Math.max(2, every, error.retryAfterS) : every);
      },
    );
    /** @param {any} next @param {number} seconds */
    function again(next, seconds) {
      setState(next);
      if (seconds) timer.current = window.setTimeout(() => document.hidden ? waitForSight(stop.signal) : setRound(round + 1), seconds * 1000);
    }
    /** @param {AbortSignal} signal */
    function waitForSight(signal) {
      document.addEventListener("visibilitychange", () => setRound(round + 1), { once: true, signal });
    }
    return () => {
      clearTimeout(timer.current);
      stop.abort();
    };
  }, [key, round, role, every]);
  const isCurrent = state.key === key;
  return { data: state.data, error: isCurrent ? state.error : null, loading: path !== null && !isCurrent, reload: () => setRound(round + 1) };
}
