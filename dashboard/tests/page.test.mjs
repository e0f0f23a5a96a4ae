// The page: first use, live updates, the keyboard, and a store outage.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Place, Redis, browser, clean, openPage, root, row, until } from "./support.mjs";

let chrome;
before(async () => (chrome = await browser()));
after(() => chrome.close());

// Each test has its own store and server.
describe("what whoever opens the page sees", { concurrency: 3 }, () => {
  test("an empty store shows how to take a lock, which then appears", async (t) => {
    const place = await Place.start(t);
    const page = await openPage(chrome, place.url);
    await page.getByText("leasehold run my-first-lock -- sleep 60").waitFor();
    await page.getByText("leasehold demo").waitFor();

    const holder = place.hold("my-first-lock", "newcomer");
    await row(page, "my-first-lock").waitFor();
    assert.equal(await page.locator(".shown").innerText(), "1 lock");
    await page.locator(".event", { hasText: "my-first-lock" }).waitFor();
    assert.equal(await page.locator(".event", { hasText: "leasehold-monitor" }).count(), 0, "the monitor's lock is hidden");
    const cells = await row(page, "my-first-lock").innerText();
    assert.match(cells, /newcomer@.*\(pid \d+\)/);
    assert.match(cells, /yes/);
    // The time runs.
    const held = () => row(page, "my-first-lock").locator(".held").innerText();
    const first = await held();
    await until("the time passes", async () => (await held()) !== first);
    await place.stop(holder);
    await row(page, "my-first-lock").waitFor({ state: "detached" });
    clean(page);
  });

  test("the timeline shows a hand-off: the wait, the order of the holders, and their ends", async (t) => {
    const place = await Place.start(t);
    const page = await openPage(chrome, place.url);
    const alice = place.hold("deploy", "alice");
    await until("alice holds it", async () => (await place.lock("deploy")).held);
    place.hold("deploy", "bob");
    await page.locator(".lane", { hasText: "deploy" }).getByText("1 waiting").waitFor();
    await row(page, "deploy").locator(".waiters .count").waitFor();
    // Leases shorter than half a second cause no events.
    await until("alice has held it for a while", async () => (await place.lock("deploy")).held_ms > 1_500);
    await place.stop(alice, "SIGINT");
    const known = await until("bob came after alice", async () => {
      const { tenures, waits } = await place.get("/api/v1/timeline");
      const [first, second] = tenures.sort((a, b) => a.since_ms - b.since_ms);
      return second?.after === first.holder_id && first.end && { first, second, waits };
    });
    assert.match(known.first.owner, /^alice@/);
    assert.equal(known.first.end, "released");
    assert.match(known.second.owner, /^bob@/);
    assert.ok(known.second.waited_ms > 0 && known.second.since_ms >= known.first.ended_ms, JSON.stringify(known));
    assert.ok(known.second.fence > known.first.fence);
    assert.equal(known.waits.length, 1);
    assert.equal(known.waits[0].ended_ms, known.second.since_ms);

    await page.getByRole("button", { name: "Show table" }).click();
    const table = page.getByRole("region", { name: "Tenures, newest first" });
    await table.getByRole("row").filter({ hasText: "alice" }).filter({ hasText: "released" }).waitFor();
    await table.getByRole("row").filter({ hasText: "bob" }).filter({ hasText: "held" }).waitFor();
    await page.getByRole("button", { name: "Show chart" }).click();
    for (let n = 0; n < 3; n += 1) await page.getByRole("button", { name: "Zoom in" }).click();
    // Both bars are drawn, in two owners' colours.
    await until("both bars are drawn", () => page.evaluate(() => {
      const canvas = document.querySelector(".plot canvas");
      if (!canvas?.width) return false;
      const style = getComputedStyle(canvas);
      const owners = Array.from({ length: 10 }, (_, n) => style.getPropertyValue(`--owner-${n}`).trim().match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16)));
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const found = new Array(10).fill(0);
      for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] < 200) continue;
        const owner = owners.findIndex(([r, g, b]) => Math.abs(r - data[i]) + Math.abs(g - data[i + 1]) + Math.abs(b - data[i + 2]) < 6);
        if (owner >= 0) found[owner] += 1;
      }
      return found.filter((pixels) => pixels > 100).length === 2;
    }));
    const events = page.getByRole("list", { name: "Events, newest first" });
    const released = events.getByRole("listitem").filter({ hasText: "released" }).filter({ hasText: "alice" });
    await released.waitFor().catch(async () => assert.fail(`no release of alice's in: ${await events.innerText()}`));
    clean(page);
  });

  test("everything works with the keyboard", async (t) => {
    const place = await Place.start(t);
    place.hold("alpha", "ada");
    place.hold("beta", "bea");
    await until("both are held", async () => (await place.lock("alpha")).held && (await place.lock("beta")).held);
    const page = await openPage(chrome, place.url);
    await row(page, "alpha").waitFor();
    const focused = (what) => page.evaluate((selector) => document.activeElement?.matches(selector) ?? false, what);

    await page.keyboard.press("/");
    assert.ok(await focused("#search"));
    await page.keyboard.type("bea");
    await row(page, "alpha").waitFor({ state: "detached" });
    await page.keyboard.press("Escape");
    await row(page, "alpha").waitFor();
    for (let n = 0; n < 80 && !(await focused('[role="grid"]')); n += 1) await page.keyboard.press("Tab");
    assert.ok(await focused('[role="grid"]'), "the locks are reached with Tab");
    await page.keyboard.press("End");
    const chosen = await until("one is chosen", () => page.evaluate(() => {
      const id = document.activeElement.getAttribute("aria-activedescendant");
      return id && document.getElementById(id)?.querySelector(".name .text").textContent;
    }));
    await page.keyboard.press("Enter");
    await page.getByRole("dialog").getByRole("heading", { name: chosen }).waitFor();
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "detached" });
    assert.ok(await focused('[role="grid"]'), "the focus is restored");

    await page.keyboard.press("e");
    const dialog = page.getByRole("dialog", { name: /away from/ });
    await dialog.waitFor();
    for (let n = 0; n < 10 && !(await focused("#evict-reason")); n += 1) await page.keyboard.press("Tab");
    await page.keyboard.type("by keyboard");
    await page.keyboard.press("Enter");
    await dialog.waitFor({ state: "detached" });
    await until("it was revoked", async () => !(await place.lock(chosen)).held);
    const audit = readFileSync(join(place.dir, "audit.jsonl"), "utf8");
    assert.match(audit, /"by keyboard"/);
    clean(page);
  });

  test("during a store outage the last known state stays, greyed, with the time", async (t) => {
    const redis = await Redis.start(t);
    const place = await Place.start(t, { store: redis.url });
    await redis.say("SET gpu_lock:7 some-other-client NX PX 600000");
    place.hold("gpu_lock:0", "tts", 600, "60s");
    const page = await openPage(chrome, place.url);
    await row(page, "gpu_lock:0").waitFor();
    await row(page, "gpu_lock:7").getByText("foreign", { exact: true }).waitFor();
    await page.getByRole("button", { name: /^foreign/ }).click();
    await row(page, "gpu_lock:0").waitFor({ state: "detached" });
    await page.getByRole("button", { name: /^foreign/ }).click();
    await redis.stop();
    const trouble = page.getByText(/The store does not answer since \d\d:\d\d:\d\d/);
    await trouble.waitFor();
    await page.locator(".pill.unhealthy").waitFor();
    assert.equal(await page.locator("main.stale").count(), 1);
    assert.equal(await row(page, "gpu_lock:0").count(), 1, "what was known is still there");
    await redis.again();
    await trouble.waitFor({ state: "detached" });
    clean(page);
    // The same for the server.
    await place.stop(place.server);
    await page.getByText(/This server does not answer since/).waitFor();
    await page.getByText("not live").waitFor();
  });

  test("the served page is the built page", async (t) => {
    const place = await Place.start(t);
    const page = await (await fetch(place.url)).text();
    const [, script, hash] = /src="(\/assets\/page\.js\?v=([0-9a-f]{16}))"/.exec(page);
    const served = await fetch(place.url + script);
    assert.match(served.headers.get("cache-control"), /immutable/);
    assert.equal(served.headers.get("etag"), `"${hash}"`);
    assert.equal(await served.text(), readFileSync(join(root, "crates/leasehold-server/page/assets/page.js"), "utf8"));
    const again = await fetch(place.url + script, { headers: { "If-None-Match": `"${hash}"` } });
    assert.equal(again.status, 304);
    const unversioned = await fetch(`${place.url}/assets/page.js`);
    assert.equal(unversioned.headers.get("cache-control"), "no-cache");
    assert.equal((await fetch(`${place.url}/assets/other.js`)).status, 404);
  });
});
