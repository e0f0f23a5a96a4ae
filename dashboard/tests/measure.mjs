// Performance. The results are printed; the bounds are far above them, so that they hold on any machine.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Place, Redis, browser, clean, openPage, row, sleep, until } from "./support.mjs";

let chrome;
before(async () => {
  chrome = await browser();
  // Not measured: the browser's start.
  await (await chrome.newPage()).close();
});
after(() => chrome.close());

const sorted = (numbers) => numbers.toSorted((a, b) => a - b);
const at = (numbers, part) => Math.round(sorted(numbers)[Math.min(numbers.length - 1, Math.floor(numbers.length * part))]);

test("the time from the start without configuration to the first page", async (t) => {
  const place = new Place();
  t.after(() => place.end());
  const began = Date.now();
  await place.serve("127.0.0.1:0");
  const listens = Date.now() - began;
  const page = await openPage(chrome, place.url);
  await page.getByText("leasehold run my-first-lock -- sleep 60").waitFor();
  // Not measured: opening an empty tab.
  const up = listens + Date.now() - page.begun;
  assert.match((await place.get("/api/v1/overview")).store, /^sqlite:.*\/leasehold\/locks\.db$/);
  console.log(`leasehold serve without configuration: listens after ${listens} ms, the page is up after ${up} ms`);
  assert.ok(up < 15_000);
  clean(page);
});

for (const kind of ["SQLite", "Redis"]) {
  test(`locks of other processes appear, on ${kind}`, async (t) => {
    const store = kind === "Redis" ? (await Redis.start(t)).url : undefined;
    const place = await Place.start(t, { store });
    // Records when each name first appears in the document.
    const page = await openPage(chrome, place.url, {
      script: () => {
        window.appeared = {};
        const note = () => {
          for (const element of document.querySelectorAll(".grid .name .text")) window.appeared[element.textContent] ??= Date.now();
        };
        document.addEventListener("DOMContentLoaded", () => new MutationObserver(note).observe(document.body, { childList: true, subtree: true, characterData: true }));
      },
    });
    await page.getByText("live", { exact: true }).waitFor();
    const names = Array.from({ length: 20 }, (_, n) => `shell-${n}`);
    for (const [n, name] of names.entries()) {
      place.hold(name, "somebody");
      // Not synchronized with the page's polls.
      await sleep(60 + ((n * 37) % 100));
    }
    await until("all are there", () => page.evaluate((names) => names.every((name) => window.appeared[name]), names));
    const appeared = await page.evaluate(() => window.appeared);
    const locks = (await place.get("/api/v1/locks?limit=100")).locks;
    const since = new Map(locks.map(({ name, since_ms }) => [name, since_ms]));
    const took = names.map((name) => appeared[name] - since.get(name));
    console.log(`${kind}: ${took.length} locks taken by leasehold run appear after ${at(took, 0.5)} ms (median), ${at(took, 1)} ms (longest)`);
    assert.ok(at(took, 0.5) < 5_000, `${took}`);
    clean(page);
  });
}

/** The duration of each frame while the list of locks is scrolled for `steps` frames. */
const frames = (page, steps, by) => page.evaluate(([steps, by]) => new Promise((done) => {
  const body = document.querySelector(".grid .body");
  body.scrollIntoView();
  const times = [];
  let last = performance.now();
  const step = (now) => {
    times.push(now - last);
    last = now;
    body.scrollTop += by;
    if (times.length <= steps) requestAnimationFrame(step);
    else done({ times: times.slice(1), rows: document.querySelectorAll(".grid .body .row").length, top: body.scrollTop });
  };
  requestAnimationFrame(step);
}), [steps, by]);

test("five thousand locks scroll smoothly, also while many of them change hands", async (t) => {
  const redis = await Redis.start(t);
  const place = await Place.start(t, { store: redis.url });
  const lock = (name, verb, body) => place.post(`/api/v1/locks/${encodeURIComponent(name)}/${verb}`, body);
  const names = Array.from({ length: 5_000 }, (_, n) => `order:${String(n).padStart(4, "0")}`);
  const take = async () => {
    for (let name = names.pop(); name; name = names.pop()) await lock(name, "acquire", { ttl_ms: 3_600_000, owner: `worker-${name.slice(-1)}` });
  };
  const began = Date.now();
  await Promise.all(Array.from({ length: 16 }, take));
  const taken = Date.now() - began;
  const page = await openPage(chrome, place.url);
  const shown = page.locator(".shown");
  await until("all are there", async () => (await shown.innerText().catch(() => "")) === "5,000 locks");
  const there = Date.now() - page.begun;
  const smooth = await frames(page, 150, 800);
  console.log(`5,000 locks: taken in ${taken} ms, all on the page after ${there} ms; ${smooth.times.length} frames of 800 px each: median ${at(smooth.times, 0.5)} ms, 95 % ${at(smooth.times, 0.95)} ms, longest ${at(smooth.times, 1)} ms; ${smooth.rows} rows in the document`);
  assert.ok(smooth.rows < 80, "only visible rows are in the document");
  assert.ok(smooth.top > 100_000);
  assert.ok(at(smooth.times, 0.5) < 250, "it moves");
  await page.getByRole("searchbox").fill("order:0042");
  await row(page, "order:0042").waitFor();
  await until("one is left", async () => (await shown.innerText()) === "1 of 5,000 locks");
  await page.getByRole("searchbox").fill("");

  // Acquire and release, which causes events.
  let changes = 0;
  let busy = true;
  const churn = async (n) => {
    while (busy) {
      const { body } = await lock(`busy:${n}`, "acquire", { ttl_ms: 60_000, owner: `worker-${n}` });
      await lock(`busy:${n}`, "release", { token: body.token });
      changes += 2;
    }
  };
  const workers = Array.from({ length: 16 }, (_, n) => churn(n));
  const first = Date.now();
  await page.locator(".event", { hasText: "busy:" }).first().waitFor();
  const before = changes;
  const from = Date.now();
  const lively = await frames(page, 120, 40);
  const found = await page.evaluate(() => new Promise((done) => {
    const began = performance.now();
    const input = document.getElementById("search");
    input.value = "order:0007";
    input.dispatchEvent(new Event("input", { bubbles: true }));
    const look = () => {
      if (document.querySelector(".grid .row:not(.head) .name .text")?.textContent === "order:0007") done(Math.round(performance.now() - began));
      else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  }));
  const rate = Math.round(((changes - before) * 1_000) / (Date.now() - from));
  busy = false;
  await Promise.all(workers);
  console.log(`${rate} changes a second among 5,000 locks (first event listed after ${from - first} ms): frames median ${at(lively.times, 0.5)} ms, 95 % ${at(lively.times, 0.95)} ms, longest ${at(lively.times, 1)} ms; a search answered in ${found} ms`);
  assert.ok(at(lively.times, 0.5) < 250, "it still moves");
  clean(page);
});
