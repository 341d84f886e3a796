/** Text from clients: topics, client ids, payloads. It may be anything, so it is text only; control,
 * bidirectional and invisible characters are shown as codes; and it is cut, with a way to see all. */
import { html, useState } from "../lib.js";
import { count } from "../format.js";
import { text } from "../text.js";

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029]/gu;
const BREAKS = /[^\n\t]/;

/** The pieces of a text: strings, and elements for characters that would not be seen.
 * @param {string} value @param {boolean} lines whether line breaks and tabs stay */
function pieces(value, lines) {
  const found = [];
  let at = 0;
  for (const match of value.matchAll(HIDDEN)) {
    if (lines && !BREAKS.test(match[0])) continue;
    const code = "U+" + /** @type {number} */ (match[0].codePointAt(0)).toString(16).toUpperCase().padStart(4, "0");
    found.push(value.slice(at, match.index), html`<span class="code" title=${text.hidden}>${code}</span>`);
    at = match.index + match[0].length;
  }
  return [...found, value.slice(at)];
}

/** A text of a client.
 * @param {{value: string, max?: number, lines?: boolean, empty?: string}} props `lines`: it may have
 * several lines */
export function Raw({ value, max = 160, lines = false, empty = text.empty }) {
  const [all, setAll] = useState(false);
  if (!value) return html`<span class="faint">${empty}</span>`;
  // A cut between two halves of a character would make it unreadable.
  const shown = all || value.length <= max ? value : value.slice(0, max).replace(/[\ud800-\udbff]$/, "");
  return html`<bdi class=${lines ? "raw lines" : "raw"}>${pieces(shown, lines)}${shown.length < value.length && html`
    <button class="more" onClick=${(/** @type {Event} */ event) => { event.stopPropagation(); setAll(true); }}
      >${text.moreCharacters(count(value.length - shown.length))}</button>`}</bdi>`;
}
