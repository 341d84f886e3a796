/** The libraries, for all modules of the console. Nothing else imports from `vendor/`. */
import htm from "./vendor/htm.js";
import { Fragment, h, render } from "./vendor/preact.js";

export { Fragment, h, render };
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal } from "./vendor/signals.js";

/** @typedef {import("./vendor/preact.js").ComponentChildren} Children */
/** @typedef {(strings: TemplateStringsArray, ...values: any[]) => any} Html */

/** Elements from a template. Values are text, never markup.
 * @type {Html} */
export const html = /** @type {any} */ (htm).bind(h);
