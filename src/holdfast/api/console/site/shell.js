/** What is around every screen: navigation, search, theme, login, and notices about the connection. */
import { AGAIN_MS, ApiError, identify, isReached, logIn, logOut, may, refusal, who } from "./api.js";
import { isLive } from "./events.js";
import { html, signal, useEffect, useState } from "./lib.js";
import { Questions } from "./parts/drawer.js";
import { link, route } from "./router.js";
import { screens } from "./screens.js";
import { text } from "./text.js";
import { Toasts, toast } from "./toasts.js";

const theme = signal(document.documentElement.dataset.theme || "system");
const isOpen = signal(false);

/** system -> light -> dark -> system */
function switchTheme() {
  const order = ["system", "light", "dark"];
  theme.value = order[(order.indexOf(theme.value) + 1) % 3];
  document.documentElement.dataset.theme = theme.value;
  localStorage.setItem("theme", theme.value);
}

/** `/` goes to the search of the screen. @param {KeyboardEvent} event */
function onKey(event) {
  const typing = /** @type {Element} */ (event.target).closest("input,textarea,select,dialog");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey) return;
  const search = /** @type {HTMLElement | null} */ (document.querySelector("main [data-search]"));
  if (search) {
    search.focus();
    event.preventDefault();
  }
}

export function Shell() {
  const path = route.value.path;
  const screen = screens.find((each) => each.path === path.split("/")[0]) || (path ? null : screens[0]);
  const reached = isReached.value;
  const known = who.value;
  useEffect(() => {
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  useEffect(() => {
    document.title = `${screen?.title || text.unknown} · Holdfast`;
    isOpen.value = false;
  }, [screen, path]);
  useEffect(() => {
    if (reached) return undefined;
    const timer = setInterval(identify, AGAIN_MS);
    return () => { clearInterval(timer); toast(text.reachedAgain); };
  }, [reached]);
  return html`<a class="skip" href="#main" onClick=${(/** @type {Event} */ event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>${text.skip}</a>
    <${Navigation} current=${screen} />
    <div class="page">
      ${!reached && html`<p class="banner" role="alert">${text.unreachedBanner}</p>`}
      <main id="main" tabindex="-1">${known === null ? html`<p class="notice faint">${refusal.value || text.loading}</p>`
        : !known.role ? html`<${Login} note=${known.name} />`
        : !screen ? html`<p class="notice">${text.noScreen}</p>`
        : !may(screen.scope) ? html`<p class="notice">${text.needsRole(screen.scope, known.role)}</p>`
        : html`<${screen.component} key=${screen.path} />`}</main>
    </div><${Toasts} /><${Questions} />`;
}

/** @param {{current: import("./screens.js").Screen | null | undefined}} props */
function Navigation({ current }) {
  const groups = /** @type {Map<string, import("./screens.js").Screen[]>} */ (new Map());
  for (const screen of screens) {
    if (may(screen.scope)) groups.set(screen.group || "", [...(groups.get(screen.group || "") || []), screen]);
  }
  return html`<nav class=${isOpen.value ? "side open" : "side"} aria-label=${text.navigation}>
    <div class="brand"><a href="#/"><img src="icon.svg" alt="" width="26" height="26" />Holdfast</a>
      <button class="plain menu" aria-expanded=${isOpen.value} aria-label=${text.menu} onClick=${() => (isOpen.value = !isOpen.value)}>☰</button></div>
    <div class="links">${[...groups].map(([group, those]) => html`
      ${group && html`<h2>${group}</h2>`}<ul>${those.map((each) => html`<li><a href=${link(each.path)} aria-current=${each === current ? "page" : undefined}>${each.title}</a></li>`)}</ul>`)}
    <div class="foot">
      <span class=${isLive.value ? "live on" : "live"} title=${isLive.value ? text.liveNote : text.notLiveNote}>${isLive.value ? text.live : text.notLive}</span>
      <button class="plain" onClick=${switchTheme} title=${text.themeNote}>${text.themes[/** @type {"system"} */ (theme.value)]}</button>
      ${who.value?.role && html`<span class="who" title=${who.value.role}>${who.value.name}</span>
        ${who.value.name !== "local" && html`<button class="plain" onClick=${logOut}>${text.logOut}</button>`}`}
    </div></div></nav>`;
}

/** @param {{note: string}} props */
function Login({ note }) {
  const [error, setError] = useState("");
  const [byToken, setByToken] = useState(false);
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const fields = Object.fromEntries(new FormData(/** @type {HTMLFormElement} */ (event.target)));
    try {
      await logIn(fields);
    } catch (refusal) {
      setError(/** @type {ApiError} */ (refusal).message);
    }
  };
  return html`<form class="login card" onSubmit=${submit}><img src="icon.svg" alt="" width="44" height="44" /><h1>${text.login.title}</h1>
    ${note && html`<p class="note">${text.login.expired}</p>`}
    ${byToken ? html`<label>${text.login.token}<input name="token" type="password" required autocomplete="off" /></label>`
      : html`<label>${text.login.user}<input name="user" required autocomplete="username" /></label>
        <label>${text.login.password}<input name="password" type="password" required autocomplete="current-password" /></label>`}
    ${error && html`<p class="notice bad" role="alert">${error}</p>`}
    <button class="primary">${text.login.submit}</button>
    <button type="button" class="plain" onClick=${() => setByToken(!byToken)}>${byToken ? text.login.byPassword : text.login.byToken}</button>
    <p class="note">${text.login.help}</p></form>`;
}
