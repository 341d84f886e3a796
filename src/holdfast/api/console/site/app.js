/** The beginning of the page: who is here, then the screen that the URL names. */
import { identify, logIn } from "./api.js";
import { follow } from "./events.js";
import { html, render } from "./lib.js";
import { Shell } from "./shell.js";
import { text } from "./text.js";
import { toast } from "./toasts.js";

/** Exchange the token of `/console/#token=...` for a session, and remove it from the URL and the
 * history at once. `&to=` names the screen to go to. */
async function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  const token = given.get("token");
  if (!token) return;
  history.replaceState(null, "", `#/${(given.get("to") || "").replace(/^#?\/?/, "")}`);
  dispatchEvent(new Event("hashchange"));
  await logIn({ token }).catch((error) => toast(text.login.tokenRefused(error.message), "bad"));
}

render(html`<${Shell} />`, document.body);
await takeToken();
await identify();
follow();
addEventListener("hashchange", takeToken);
