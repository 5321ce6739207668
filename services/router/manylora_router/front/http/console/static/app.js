// Logs a key in, and shows the page that the address names, again and again while somebody looks.

import { data, forget, keep, key, Refused } from "/console/api.js";
import { h, know, show } from "/console/dom.js";
import * as adapters from "/console/pages/adapters.js";
import * as costs from "/console/pages/costs.js";
import * as overview from "/console/pages/overview.js";
import * as playground from "/console/pages/playground.js";
import * as requests from "/console/pages/requests.js";
import * as tenants from "/console/pages/tenants.js";
import * as workers from "/console/pages/workers.js";

const PAGES = { overview, tenants, workers, adapters, requests, costs, playground };
const THEME = "manylora-theme";
const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const [top, main] = [document.getElementById("top"), document.getElementById("main")];

let session = null;
let shown = null;
let timer = 0;
let turn = 0;

function theme(next) {
  const chosen = next ?? localStorage.getItem(THEME) ?? "auto";
  if (next) localStorage.setItem(THEME, next);
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  return chosen;
}

function themeButton() {
  const button = h("button", { type: "button", id: "theme", onclick: () => {
    const names = Object.keys(THEMES);
    button.textContent = THEMES[theme(names[(names.indexOf(theme()) + 1) % names.length])];
  } }, THEMES[theme()]);
  return button;
}

const isFor = (page) => (session.operator || !page.forOperators) && (session.may_read_usage || !page.ofUsage);

function bar(name) {
  const pages = session ? Object.entries(PAGES).filter(([, each]) => isFor(each)) : [];
  show(top, h("div", { class: "bar" },
    h("span", { class: "name" }, h("img", { src: "/console/icon.svg", alt: "" }), "manylora"),
    h("nav", { "aria-label": "Pages" }, pages.map(([each, { title }]) =>
      h("a", { href: `#/${each}`, "aria-current": each === name && "page" }, each === "tenants" && !session.operator ? "Usage" : title))),
    h("span", { class: "who" }, session && h("span", { class: "small soft" }, session.operator ? "operator" : session.tenant), themeButton(),
      session && h("button", { type: "button", id: "logout", onclick: () => leave() }, "Log out"))));
}

function leave(problem = "") {
  forget();
  session = null;
  end();
  login(problem);
}

function end() {
  clearTimeout(timer);
  turn += 1;
  shown?.leave?.();
  shown = null;
}

function login(problem = "") {
  document.title = "Log in – manylora console";
  bar();
  const input = h("input", { type: "password", id: "key", autocomplete: "off", required: true, spellcheck: "false" });
  const submit = async (event) => {
    event.preventDefault();
    keep(input.value.trim());
    await begin();
  };
  show(main, h("div", { class: "card login" }, h("h1", null, "Log in"),
    h("form", { onsubmit: submit }, h("label", { for: "key" }, "API key or token", input),
      problem && h("p", { class: "bad", role: "alert" }, problem), h("button", { class: "main", type: "submit" }, "Log in"),
      h("p", { class: "soft small" }, "It stays in this tab, and is forgotten when the tab is closed. A tenant's key shows its own tenant, an operator's the whole cluster."))));
  input.focus();
}

async function begin() {
  if (!key()) return login();
  try {
    session = await data("me");
  } catch (error) {
    return leave(error.message);
  }
  know(session.tenants.slice(0, 8));
  turnTo();
}

function turnTo() {
  if (!session) return;
  end();
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const known = name in PAGES && isFor(PAGES[name]) ? name : "overview";
  let id = rest.join("/");
  try {
    id = decodeURIComponent(id);
  } catch {
    // a per cent sign that stands for nothing: as it is
  }
  bar(known);
  document.title = `${PAGES[known].title} – manylora console`;
  const problem = h("div", { "aria-live": "polite" });
  shown = PAGES[known].page(session, id);
  show(main, problem, shown.element);
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
  look(turn, problem);
}

/** Asks for what the page shows, now and every few seconds while the tab is in sight. */
async function look(mine, problem) {
  const page = shown;
  if (!document.hidden) {
    try {
      await page.refresh();
      if (mine === turn) show(problem);
    } catch (error) {
      if (mine !== turn) return;
      if (error instanceof Refused && error.status === 401) return leave(error.message);
      console.warn(error.message);
      show(problem, h("p", { class: "notice bad" }, `${error.message} What is shown may be old.`));
    }
  }
  if (mine === turn && page.everyS) timer = setTimeout(() => look(mine, problem), 1000 * page.everyS);
}

addEventListener("hashchange", turnTo);
theme();
begin();
