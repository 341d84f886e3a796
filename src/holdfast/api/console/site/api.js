/** The requests to the admin API, and what they say about the connection and the login.
 *
 * Everything here is a documented route: `curl` can do what the console can. */
import { signal } from "./lib.js";
import { text } from "./text.js";

/** A refusal of the broker, or (status 0) no reply at all. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message @param {number} retryAfterS */
  constructor(status, message, retryAfterS = 0) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** @typedef {"admin" | "operator" | "reader" | "viewer" | ""} Role */
/** The caller's name and role; null: not known yet; role "": nobody is logged in.
 * @type {import("./vendor/signals.js").Signal<{name: string, role: Role} | null>} */
export const who = signal(/** @type {any} */ (null));
/** Whether the broker replies. */
export const isReached = signal(true);
/** Why the broker did not say who the caller is. */
export const refusal = signal("");
export const AGAIN_MS = 2000;

const ROLES = ["viewer", "reader", "operator", "admin"];
const BASE = new URL("../api/v1/", location.href);

/** Whether the caller has a role. @param {string} role */
export const may = (role) => ROLES.indexOf(who.value?.role || "") >= ROLES.indexOf(role);

/** The absolute URL of a route. @param {string} path @param {Record<string, any>} [params] */
export function urlOf(path, params = {}) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(params)) {
    if (value !== "" && value != null) url.searchParams.set(name, String(value));
  }
  return url;
}

/** @typedef {{params?: Record<string, any>, body?: any, signal?: AbortSignal}} Options */

/** Send a request, and return its JSON. Throws `ApiError`.
 * @param {string} method @param {string} path below `/api/v1/` @param {Options} [options]
 * @returns {Promise<any>} */
export async function request(method, path, { params, body, signal } = {}) {
  const was = who.value;
  /** @type {Response} */
  let reply;
  try {
    reply = await fetch(urlOf(path, params), {
      method, signal, cache: "no-store",
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    isReached.value = false;
    throw new ApiError(0, text.unreached);
  }
  isReached.value = true;
  const content = await reply.json().catch((error) => {
    if (signal?.aborted) throw error;
    // A reply that ends early is no data.
    if (reply.ok) throw new ApiError(0, text.unreached);
    return { error: `${reply.status} ${reply.statusText}` };
  });
  if (reply.ok) return content;
  // It ends no later login.
  if (reply.status === 401 && path + method !== "loginPOST" && who.value === was) who.value = { name: "", ...was, role: "" };
  throw new ApiError(reply.status, content.error, Number(reply.headers.get("Retry-After")));
}

/** @param {string} path @param {Record<string, any>} [params] @param {AbortSignal} [signal] */
export const get = (path, params, signal) => request("GET", path, { params, signal });
/** @param {string} path @param {Record<string, any>} [params] @param {any} [body] */
export const post = (path, params, body) => request("POST", path, { params, body });
/** @param {string} path @param {Record<string, any>} [params] @param {any} [body] */
export const put = (path, params, body) => request("PUT", path, { params, body });
/** @param {string} path @param {Record<string, any>} [params] */
export const remove = (path, params) => request("DELETE", path, { params });

/** Find out who the caller is. A broker that refuses to say so (but 401) would refuse a login, too: it is asked again. */
export async function identify() {
  const was = who.value;
  const found = await get("login").catch(({ status, message }) => {
    refusal.value = message;
    if (status && !who.value) setTimeout(identify, AGAIN_MS);
  });
  if (found && who.value === was) who.value = found;
}

/** Log in with a user and password, or a token. Throws `ApiError`. @param {object} credentials */
export async function logIn(credentials) {
  who.value = await post("login", {}, credentials);
}

export async function logOut() {
  await remove("login");
  who.value = null;
  await identify();
}
