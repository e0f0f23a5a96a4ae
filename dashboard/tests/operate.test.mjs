// The operator's tasks: alerts, GPUs, the journal, the audit, the counters, and a restarted server.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Place, Redis, browser, clean, openPage, row, until } from "./support.mjs";

let chrome;
before(async () => (chrome = await browser()));
after(() => chrome.close());

const alert = (page, type) => page.locator(".alert", { has: page.locator(".type", { hasText: new RegExp(`^${type.replaceAll("_", " ")}$`) }) });

// Each test has its own store and server.
describe("what an operator comes for", { concurrency: 3 }, () => {
  test("a failed release is in the journal, raises an alert, and can be settled", async (t) => {
    const redis = await Redis.start(t);
    const place = await Place.start(t);
    // A client of the same machine and user, on another store that disappears.
    const holder = place.spawn(["run", "--owner", "tts-worker-9", "--ttl", "10m", "--store", redis.url, "gpu_lock:3", "--", "sh", "-c", "echo in; exec sleep 600"]);
    await until("it holds the lock", () => holder.out.includes("in"));
    await redis.stop();
    await place.stop(holder);

    const page = await openPage(chrome, place.url);
    const failed = alert(page, "journal_not_empty");
    await failed.locator(".level", { hasText: "warning" }).waitFor();
    await page.locator(".pill.degraded").getByText("1 alert").waitFor();
    await page.locator(".alerts").getByText("1 firing").waitFor();

    await page.getByRole("tab", { name: /^Journal\s*1$/ }).click();
    const entry = page.getByRole("region", { name: "Journal" }).getByRole("row").filter({ hasText: "gpu_lock:3" });
    await entry.getByText(/^tts-worker-9@/).waitFor();
    await entry.getByText("not released").waitFor();
    await entry.getByRole("button", { name: "Settle…" }).click();
    await entry.getByRole("button", { name: "Settle", exact: true }).click();
    assert.equal(JSON.parse(await place.run(["journal", "list", "--json"])).length, 1, "without a reason nothing is done");
    await entry.getByLabel("Reason").fill("that store is no more");
    await entry.getByRole("button", { name: "Settle", exact: true }).click();
    await page.getByText("Settled: gpu_lock:3.").waitFor();
    await page.getByText("The journal is empty.").waitFor();
    assert.deepEqual(JSON.parse(await place.run(["journal", "list", "--json"])), []);
    await failed.locator(".level", { hasText: "resolved" }).waitFor();
    await page.locator(".alerts").getByText("none", { exact: true }).waitFor();
    await page.locator(".pill.healthy").waitFor();

    await page.getByRole("tab", { name: "Audit" }).click();
    const line = page.getByRole("region", { name: "Audit, newest first" }).getByRole("row").filter({ hasText: "settled" });
    await line.getByText("that store is no more").waitFor();
    assert.equal(await line.count(), 1);
    clean(page);
  });

  test("the four exception counters rise and raise alerts", async (t) => {
    const redis = await Redis.start(t);
    const place = await Place.start(t, { store: redis.url });
    await redis.say("ACL SETUSER worker on >secret ~* &* +@all");
    const page = await openPage(chrome, place.url);
    const counter = (title) => page.locator(".counters dl > div", { hasText: title }).locator("dd .number").first();
    await until("nothing has happened yet", async () => (await counter("Script errors").innerText()) === "0");

    // Scripts are forbidden while it holds the lock, so the release uses a fallback.
    const worker = place.spawn(["run", "--owner", "tts-worker-1", "gpu_lock:0", "--", "sleep", "600"], { env: { LEASEHOLD_STORE: redis.url.replace("//", "//worker:secret@") } });
    await until("it holds the lock", async () => (await place.lock("gpu_lock:0")).held);
    await redis.say("ACL SETUSER worker -eval -evalsha -script");
    await place.stop(worker, "SIGINT");
    // A lock is released after it was taken away.
    const [token] = (await place.run(["acquire", "stuck", "--ttl", "10m"])).split("\n");
    const { holder_id } = await place.lock("stuck");
    await place.post("/api/v1/locks/stuck/evict", { holder_id, mode: "force", reason: "it hangs" });
    assert.equal((await place.post("/api/v1/locks/stuck/release", { token })).status, 409);

    for (const title of ["Release failures", "Emergency releases", "Script errors", "Ownership violations"]) {
      await until(`${title}: 1`, async () => (await counter(title).innerText()) === "1");
    }
    for (const type of ["lua_script_error", "gpu_lock_emergency_release"]) {
      await alert(page, type).locator(".level", { hasText: "critical" }).waitFor();
      await alert(page, type).getByRole("button", { name: "gpu_lock:0" }).waitFor();
    }
    await alert(page, "ownership_violations").waitFor();
    const text = await page.locator("body").innerText();
    assert.ok(!text.includes("secret") && !text.includes(token), "no secret is shown");
    clean(page);
  });

  test("GPUs: holders and waiters by host; foreign holders are marked", async (t) => {
    const redis = await Redis.start(t);
    const place = await Place.start(t, { store: redis.url });
    const page = await openPage(chrome, place.url);
    await page.getByText("No lock is held").first().waitFor();
    assert.equal(await page.locator(".gpus").count(), 0, "without GPUs there is nothing to show");
    const tts = place.hold("gpu_lock:0", "tts-worker-1");
    await until("it is held", async () => (await place.lock("gpu_lock:0")).held);
    place.hold("gpu_lock:0", "ocr-worker-1");
    await until("one waits", async () => (await place.lock("gpu_lock:0")).waiters.length === 1);
    place.hold("gpu_lock:0", "whisper-1");
    place.hold("gpu_lock:gpu-b:1", "train");
    await redis.say(`SET gpu_lock:5 "evil\u202e<img src=x onerror=boom()>\\x1b[2J" PX 600000`);
    const card = (id, host) => page.locator(".gpus .host", host ? { has: page.getByRole("heading", { name: host }) } : {}).locator(".gpu", { hasText: `GPU ${id}` });
    await card(0).getByText("tts-worker-1").waitFor();
    await card(0).getByText("2 waiting: ocr-worker-1 first").waitFor();
    await card(1, "gpu-b").getByText("train").waitFor();
    await card(5).getByText(/^evil\\u\{202e\}<img src=x onerror=boom\(\)>/).waitFor();
    await place.stop(tts, "SIGINT");
    await card(0).getByText("ocr-worker-1", { exact: false }).first().waitFor();
    await card(0).getByText("1 waiting: whisper-1").waitFor();
    await card(0).getByRole("button").click();
    await page.locator(".drawer").getByRole("heading", { name: "gpu_lock:0" }).waitFor();
    clean(page);
  });

  test("after a server restart two pages reconnect without duplicate events", async (t) => {
    const place = await Place.start(t);
    place.hold("alpha", "ada");
    const pages = await Promise.all([1, 2].map(() => openPage(chrome, place.url)));
    const line = (page, name, kind) => page.getByRole("list", { name: "Events, newest first" }).getByRole("listitem").filter({ hasText: name }).filter({ hasText: kind });
    for (const page of pages) await line(page, "alpha", "granted").waitFor();
    await place.stop(place.server);
    for (const page of pages) {
      await page.getByText(/This server does not answer since/).waitFor();
      await page.getByText("not live").waitFor();
      assert.equal(await row(page, "alpha").count(), 1, "what was known is still there");
    }
    // Meanwhile locks change.
    place.hold("beta", "bea");
    await until("beta is held", async () => JSON.parse(await place.run(["why", "beta", "--json"])).held);
    await place.serve(new URL(place.url).host);
    for (const page of pages) {
      await page.getByText("live", { exact: true }).waitFor();
      await page.getByText(/This server does not answer since/).waitFor({ state: "detached" });
      await row(page, "beta").waitFor();
    }
    const gamma = place.hold("gamma", "gil");
    for (const page of pages) await line(page, "gamma", "granted").waitFor();
    await place.stop(gamma, "SIGINT");
    for (const page of pages) {
      await line(page, "gamma", "released").waitFor();
      assert.equal(await line(page, "gamma", "granted").count(), 1);
      assert.equal(await line(page, "alpha", "granted").count(), 1);
      clean(page);
    }
  });

  test("on a phone: evict from the card and the drawer, and find it in the audit", async (t) => {
    const place = await Place.start(t);
    place.hold("deploy", "carol");
    await until("carol holds it", async () => (await place.lock("deploy")).held);
    place.hold("deploy", "dave");
    await until("dave waits", async () => (await place.lock("deploy")).waiters.length === 1);
    place.hold("a-name-that-is-far-too-long-for-any-phone:".repeat(4), `${"an-owner-that-is-no-shorter-".repeat(2)}x`);
    const page = await openPage(chrome, place.url, { viewport: { width: 360, height: 740 }, deviceScaleFactor: 2, hasTouch: true, isMobile: true });
    const fits = async (where) => {
      const [wide, room] = await page.evaluate(() => [document.scrollingElement.scrollWidth, document.documentElement.clientWidth]);
      assert.ok(wide <= room, `${where}: ${wide} px wide on a screen of ${room}`);
    };
    await row(page, "deploy").waitFor();
    await page.locator(".grid .row", { hasText: "far-too-long" }).waitFor();
    assert.equal(await page.locator(".timeline").count(), 0, "numbers, alerts, and locks as cards");
    await fits("the page");
    await row(page, "deploy").tap();
    const drawer = page.locator(".drawer");
    await drawer.getByText(/dave@/).waitFor();
    await fits("the drawer");
    const over = await drawer.locator(".tenures td.number").evaluateAll((cells) => cells.map((cell) => {
      const text = document.createRange();
      text.selectNodeContents(cell);
      return text.getBoundingClientRect().right - cell.getBoundingClientRect().right;
    }));
    assert.ok(over.length >= 3 && over.every((px) => px <= 0), `each in a column of its own: ${over}`);
    await drawer.getByRole("button", { name: "Evict…" }).tap();
    const dialog = page.getByRole("dialog", { name: "Take deploy away from carol" });
    await dialog.getByLabel(/^Reason/).fill("from the train");
    const agree = dialog.getByRole("button", { name: "Revoke carol" });
    await fits("the dialog");
    const box = await agree.boundingBox();
    assert.ok(box.x >= 0 && box.x + box.width <= 360 && box.height >= 32, JSON.stringify(box));
    await agree.tap();
    await drawer.locator(".holder").getByText(/dave@/).waitFor();
    await drawer.getByRole("button", { name: "Close" }).tap();
    await drawer.waitFor({ state: "detached" });
    await page.getByRole("tab", { name: "Audit" }).tap();
    const lines = page.getByRole("region", { name: "Audit, newest first" }).getByRole("row").filter({ hasText: "from the train" });
    await until("asked, and done", async () => (await lines.count()) === 2);
    const reason = await lines.first().getByText("from the train").boundingBox();
    assert.ok(reason.width > 80 && reason.height < 60, `it can be read: ${JSON.stringify(reason)}`);
    await fits("the audit");
    clean(page);
  });
});
