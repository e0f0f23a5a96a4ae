// Keys and roles; and strings that try to inject scripts.
import assert from "node:assert/strict";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { Place, browser, clean, openPage, row, until } from "./support.mjs";

let chrome;
before(async () => (chrome = await browser()));
after(() => chrome.close());

test("login: the key is required, kept for the tab, and limits what the user can do", async (t) => {
  const bare = new Place();
  t.after(() => bare.end());
  bare.store = `sqlite:${join(bare.dir, "none.db")}`;
  const keys = join(bare.dir, "keys.json");
  const viewer = (await bare.run(["keys", "create", "looker", "--keys", keys])).trim();
  const operator = (await bare.run(["keys", "create", "ops", "--role", "operator", "--keys", keys])).trim();
  const place = await Place.start(t, { args: ["--keys", keys] });
  place.hold("deploy", "alice");

  const page = await openPage(chrome, place.url);
  const asked = [];
  page.on("request", (request) => asked.push(request));
  const field = page.getByLabel("Key", { exact: true });
  await field.waitFor();
  assert.equal(await page.getByText("deploy").count(), 0, "nothing is shown before");
  await field.fill(`${operator}x`);
  await page.getByRole("button", { name: "Enter" }).click();
  await page.getByText("this key is unknown or was revoked").waitFor();
  await field.fill(operator);
  await field.press("Enter");
  await row(page, "deploy").waitFor();
  await page.getByText("operator", { exact: true }).waitFor();
  await page.getByText("live", { exact: true }).waitFor();
  await page.reload();
  await row(page, "deploy").waitFor();
  for (const request of asked) assert.ok(!request.url().includes(operator), "no URL contains the key");
  assert.deepEqual(await page.evaluate(() => Object.keys(localStorage)), [], "nothing outlives the tab");
  assert.equal((await page.context().cookies()).length, 0);
  await page.getByRole("button", { name: "Log out" }).click();
  await field.waitFor();
  assert.equal(await page.getByText("deploy").count(), 0);
  await page.reload();
  await field.waitFor();

  await field.fill(viewer);
  await field.press("Enter");
  await row(page, "deploy").click();
  const evict = page.getByRole("button", { name: "Evict…" });
  await evict.waitFor();
  assert.ok(await evict.isDisabled());
  await page.locator(".drawer").getByText(/evicting needs an operator key/).waitFor();
  await page.keyboard.press("Escape");
  await page.getByRole("grid").focus();
  await page.keyboard.press("e");
  await page.getByRole("status").getByText(/evicting needs an operator key/).waitFor();
  assert.equal(await page.locator("dialog").count(), 0);
  clean(page);
});

const VECTORS = [
  "<script>boom()</script>",
  "<img src=x onerror=boom()>",
  "<svg onload=boom()>",
  "\"><script>boom()</script>",
  "'><img src=x onerror=boom()>",
  "<iframe src=javascript:boom()>",
  "<body onload=boom()>",
  "javascript:boom()",
  "<a href=javascript:boom()>x</a>",
  "<details open ontoggle=boom()>",
  "<input autofocus onfocus=boom()>",
  "<video><source onerror=boom()>",
  "</title><script>boom()</script>",
  "</style><script>boom()</script>",
  "</textarea><script>boom()</script>",
  "<math><mi xlink:href=javascript:boom()>",
  "{{constructor.constructor('boom()')()}}",
  "${boom()}",
  "<template><script>boom()</script></template>",
  "&lt;script&gt;boom()&lt;/script&gt;",
  "<scr<script>ipt>boom()</scr</script>ipt>",
  "<img src=\"x` `<script>boom()</script>\"` `>",
  "\" onmouseover=boom() x=\"",
  "' autofocus onfocus='boom()",
  "<object data=javascript:boom()>",
  "<embed src=javascript:boom()>",
  "<link rel=stylesheet href=//evil.example/x.css>",
  "<style>@import '//evil.example/x'</style>",
  "<meta http-equiv=refresh content='0;url=javascript:boom()'>",
  "<form action=javascript:boom()><button>",
  "<base href=//evil.example/>",
  "<marquee onstart=boom()>",
  "%3Cscript%3Eboom()%3C/script%3E",
  "\\u003cscript\\u003eboom()\\u003c/script\\u003e",
  "--><script>boom()</script>",
  "]]><script>boom()</script>",
  "<svg><animate onbegin=boom() attributeName=x>",
  "<img src=x:x onerror=boom() //",
  "<div style=background:url(//evil.example/x)>",
  "__proto__",
  // Invisible characters and direction overrides are escaped, as by the command.
  "deploy\u202egnp.exe",
  "\u2066admin\u2069\u200b",
  "\ufeff<b onclick=boom()>\u2028",
  "tag\u{e0041}ged\u00ad",
];

/** Escapes a text like the page. */
const written = (text) => text.replace(/[\u00ad\u200b\u2028\u202e\u2066\u2069\ufeff\u{e0041}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

test("two hundred injection strings are shown as text", async (t) => {
  const place = await Place.start(t);
  for (const text of ["esc\u001b[2J", "nul\u0000", "two\nlines", "c1\u009b31m"]) {
    const refused = await place.post(`/api/v1/locks/${encodeURIComponent(text)}/acquire`, { ttl_ms: 600_000, owner: "x" });
    assert.equal(refused.body.code, "invalid_name", "control characters are rejected");
  }
  const strings = Array.from({ length: 200 }, (_, n) => `${VECTORS[n % VECTORS.length]}${n < VECTORS.length ? "" : ` ${n}`}`);
  for (const [n, text] of strings.entries()) {
    const taken = await place.post(`/api/v1/locks/${encodeURIComponent(text)}/acquire`, { ttl_ms: 600_000, owner: text.slice(0, 100) });
    assert.equal(taken.status, 200, `${text}: ${JSON.stringify(taken.body)}`);
    if (n % 2 === 0) continue;
    const gone = await place.post(`/api/v1/locks/${encodeURIComponent(text)}/evict`, { holder_id: taken.body.holder_id, mode: "force", reason: text });
    assert.equal(gone.status, 200, JSON.stringify(gone.body));
    const again = await place.post(`/api/v1/locks/${encodeURIComponent(text)}/acquire`, { ttl_ms: 600_000, owner: text.slice(0, 100) });
    assert.equal(again.status, 200);
  }
  const page = await openPage(chrome, place.url, {
    script: () => {
      window.executed = 0;
      window.boom = window.alert = window.confirm = window.prompt = () => (window.executed += 1);
    },
  });
  const count = page.locator(".shown");
  await until("all are there", async () => (await count.innerText()) === "200 locks");
  // Events that arrive while the page is open appear in the feed and in notifications.
  for (const text of strings.slice(0, 60)) {
    const held = await place.lock(text);
    await place.post(`/api/v1/locks/${encodeURIComponent(text)}/evict`, { holder_id: held.holder_id, mode: "force", reason: text });
    await place.post(`/api/v1/locks/${encodeURIComponent(text)}/acquire`, { ttl_ms: 600_000, owner: text.slice(0, 100) });
  }
  let unescaped = 0;
  const shown = new Set();
  const look = async () => {
    const found = await page.evaluate(() => {
      const root = document.getElementById("page");
      const strange = root.querySelectorAll("script, iframe, object, embed, link, style, base, meta, math, form[action], video, marquee, animate, template, body, img:not([src='/assets/icon.svg']), a[href^='javascript']");
      const handlers = [...root.querySelectorAll("*")].filter((element) => [...element.attributes].some(({ name }) => name.startsWith("on")));
      const texts = [...root.querySelectorAll(".grid .name .text, .lane .name, .drawer h2, .event .link, .event .reason, .records td")].map((element) => element.textContent);
      return { strange: strange.length + handlers.length, texts };
    });
    unescaped += found.strange;
    for (const text of found.texts) shown.add(text);
  };
  // Locks that were taken again move to the end; wait for that.
  const top = page.locator(".grid .row[aria-rowindex='2'] .name .text");
  await until("the rows stand still", async () => (await top.textContent()) === written(strings[60]));
  for (let end = false; !end; ) {
    await look();
    end = await page.evaluate(() => new Promise((done) => {
      const body = document.querySelector(".grid .body");
      const before = body.scrollTop;
      body.scrollTop += body.clientHeight / 2;
      requestAnimationFrame(() => requestAnimationFrame(() => done(body.scrollTop === before)));
    }));
  }
  await page.getByRole("button", { name: /^Show \d+ more lock/ }).click();
  await look();
  await page.getByRole("button", { name: "Show table" }).click();
  await look();
  for (const text of strings.slice(0, VECTORS.length)) {
    await page.evaluate((name) => (location.hash = `#${encodeURIComponent(name)}`), text);
    await until(`the drawer of ${text}`, async () => (await page.locator(".drawer h2").textContent().catch(() => "")) === written(text));
    await look();
  }
  await page.locator(".drawer").getByRole("button", { name: "Evict…" }).click();
  await page.locator("dialog.evict").waitFor();
  await look();
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.keyboard.press("Escape");
  await page.getByRole("tab", { name: "Audit" }).click();
  await page.getByRole("region", { name: "Audit, newest first" }).getByRole("row").nth(100).waitFor();
  await look();
  const turned = await page.evaluate(() => /[\u00ad\u200b\u2028\u202e\u2066\u2069\ufeff]/.test(document.getElementById("page").innerText));
  assert.ok(!turned, "no direction override is in the text");
  const missing = strings.filter((text) => !shown.has(written(text)));
  const executed = await page.evaluate(() => window.executed);
  console.log(`board S10: ${strings.length} strings as names, owners and reasons: ${executed} executed, ${unescaped} unescaped, ${page.seen.violations.length} violations of the policy, ${page.seen.foreign.length} requests elsewhere`);
  assert.deepEqual(missing, [], "each was shown");
  assert.deepEqual([executed, unescaped], [0, 0]);
  clean(page);
});
