// The texts of the page, each caused by a real event.
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Place, Redis, browser, clean, openPage, row, until } from "./support.mjs";

let chrome;
let dir;
before(async () => {
  chrome = await browser();
  dir = await mkdtemp(join(tmpdir(), "leasehold-telling-"));
});
after(async () => {
  await chrome.close();
  await rm(dir, { recursive: true, force: true });
});

const event = (page, kind, name) => page.getByRole("list", { name: "Events, newest first" }).getByRole("listitem").filter({ has: page.locator(".kind", { hasText: new RegExp(`^${kind}$`) }) }).filter({ hasText: name });
const tile = (page, label) => page.locator(".tile", { has: page.locator(".label", { hasText: new RegExp(`^${label}`) }) });
const chip = (page, title) => page.getByRole("group", { name: "Which locks" }).getByRole("button", { name: title });

// Each test has its own store and server.
describe("what the page tells", { concurrency: 3 }, () => {
  test("a holder over its time limit is asked to finish: events, alerts, locks and audit show it", async (t) => {
    const config = join(dir, "monitor.yaml");
    writeFileSync(config, "gpu_lock_monitor:\n  monitor_interval: 1\n  timeout_levels: {warning: 1, soft_timeout: 2, hard_timeout: 900}\n");
    const place = await Place.start(t, { args: ["--config", config] });
    const page = await openPage(chrome, place.url);
    const holder = place.hold("gpu_lock:0", "tts-worker-1");
    const asked = event(page, "asked to finish", "gpu_lock:0");
    await asked.waitFor();
    assert.match(await asked.innerText(), /tts-worker-1/);
    const { owner, reason } = (await place.get("/api/v1/monitor")).actions.find(({ action }) => action === "ask");
    assert.match(owner, /^tts-worker-1@/);
    assert.ok(reason && (await asked.innerText()).includes(reason), `the reason is shown: ${reason}`);
    const over = page.locator(".alert", { has: page.locator(".type", { hasText: /^lock over soft$/ }) });
    await over.locator(".level", { hasText: "warning" }).waitFor();
    await over.getByRole("button", { name: "gpu_lock:0" }).waitFor();
    await row(page, "gpu_lock:0").locator(".held.over").waitFor();

    await chip(page, /^over 1s 1$/).click();
    await row(page, "gpu_lock:0").waitFor();

    await page.getByRole("tab", { name: "Audit" }).click();
    const lines = page.getByRole("region", { name: "Audit, newest first" }).getByRole("row").filter({ hasText: "gpu_lock:0" });
    await lines.filter({ hasText: "told" }).filter({ hasText: "ask" }).first().waitFor();
    // It kept the lock, which is not a bad end.
    assert.equal((await place.lock("gpu_lock:0")).owner, owner);
    assert.equal(await tile(page, "Bad ends").locator(".value").innerText(), "0");
    await place.stop(holder, "SIGINT");
    await event(page, "released", "gpu_lock:0").waitFor();
    await over.locator(".level", { hasText: "resolved" }).waitFor();
    clean(page);
  });

  test("the five numbers count what happens", async (t) => {
    const place = await Place.start(t);
    const page = await openPage(chrome, place.url);
    const says = (label, value) => until(`${label}: ${value}`, async () => (await tile(page, label).locator(".value").innerText()) === value);
    await says("Held", "0");
    await says("Longest wait now", "none");
    const alice = place.hold("deploy", "alice");
    await until("alice holds it", async () => (await place.lock("deploy")).held);
    place.hold("deploy", "bob");
    await says("Held", "1");
    await says("Waiting", "1");
    await until("the wait goes on", async () => /^[2-9]s$/.test(await tile(page, "Longest wait now").locator(".value").innerText()));
    place.hold("other", "carol");
    await row(page, "other").waitFor();
    await chip(page, /^contended 1/).click();
    await row(page, "other").waitFor({ state: "detached" });
    assert.equal(await page.locator(".shown").innerText(), "1 of 2 locks");
    await chip(page, /^contended 1/).click();

    await place.stop(alice, "SIGINT");
    await says("Hand-offs per minute", "1");
    await says("Waiting", "0");
    await says("Longest wait now", "none");
    assert.equal(await page.locator(".tile.bad").count(), 0);
    const { holder_id } = await place.lock("other");
    await place.post("/api/v1/locks/other/evict", { holder_id, mode: "force", reason: "a test" });
    await says("Bad ends", "1");
    await page.locator(".tile.bad", { hasText: "Bad ends" }).waitFor();
    const forced = event(page, "forced", "other");
    await forced.getByText("a test").waitFor();
    assert.match(await forced.innerText(), /carol/);
    clean(page);
  });

  test("the drawer shows revoked and foreign locks and the command for a terminal", async (t) => {
    const redis = await Redis.start(t);
    const place = await Place.start(t, { store: redis.url });
    const name = "two words, and a 'quote'";
    const taken = await place.post(`/api/v1/locks/${encodeURIComponent(name)}/acquire`, { ttl_ms: 600_000, owner: "deploy.rb" });
    await place.post(`/api/v1/locks/${encodeURIComponent(name)}/evict`, { holder_id: taken.body.holder_id, reason: "make room" });
    await redis.say("SET gpu_lock:7 some-other-client NX PX 600000");
    const page = await openPage(chrome, place.url);
    await row(page, name).getByText("revoked", { exact: true }).waitFor();
    await row(page, name).click();
    const drawer = page.locator(".drawer");
    await drawer.getByText("held, revoked: its holder has been told to stop").waitFor();
    await drawer.getByText("deploy.rb").first().waitFor();
    assert.equal(await drawer.locator(".foot code").innerText(), String.raw`leasehold why 'two words, and a '\''quote'\'''`);
    await page.keyboard.press("Escape");
    await row(page, "gpu_lock:7").click();
    await drawer.getByText("unknown: another kind of client").waitFor();
    assert.equal(await drawer.locator(".foot code").innerText(), "leasehold why gpu_lock:7");
    await drawer.getByText("Nobody.").waitFor();
    await event(page, "revoked", name).getByText("make room").waitFor();
    clean(page);
  });

  test("hovering over a bar shows its holder, and a click opens its lock", async (t) => {
    const place = await Place.start(t);
    place.hold("deploy", "alice");
    await until("alice holds it", async () => (await place.lock("deploy")).held_ms > 1_000);
    const page = await openPage(chrome, place.url);
    await page.locator(".lane", { hasText: "deploy" }).waitFor();
    for (let n = 0; n < 6; n += 1) await page.getByRole("button", { name: "Zoom in" }).click();
    const card = page.locator(".plot .card");
    // Just before the current time, in the lane.
    await until("the card of the bar", async () => {
      const [plot, lane] = [await page.locator(".plot").boundingBox(), await page.locator(".lane", { hasText: "deploy" }).boundingBox()];
      for (let y = lane.y + 2; y < lane.y + lane.height; y += 3) {
        await page.mouse.move(plot.x + plot.width * 0.96, y);
        if ((await card.count()) === 1) return true;
      }
      return false;
    });
    const { fence } = (await place.get("/api/v1/timeline")).tenures[0];
    const text = await card.innerText();
    for (const part of ["alice@", "deploy", "so far", String(fence)]) assert.ok(text.includes(part), `${part} in ${text}`);
    await page.mouse.down();
    await page.mouse.up();
    await page.locator(".drawer").getByRole("heading", { name: "deploy" }).waitFor();
    clean(page);
  });

  test("on a phone neither the empty page nor the eviction of a very long name is cut off", async (t) => {
    const redis = await Redis.start(t);
    const place = await Place.start(t, { store: redis.url });
    const page = await openPage(chrome, place.url, { viewport: { width: 360, height: 740 }, deviceScaleFactor: 2, hasTouch: true, isMobile: true });
    /** The elements that extend beyond the screen. */
    const beyond = (inside) => page.locator(inside).evaluate((top) => {
      const room = document.documentElement.clientWidth;
      const out = [...top.querySelectorAll("*")].filter((element) => element.getBoundingClientRect().right > room + 1 && getComputedStyle(element).visibility !== "hidden");
      return out.map((element) => `${element.tagName}.${element.className} ${element.getBoundingClientRect().right}`);
    });
    await page.getByText("leasehold demo").waitFor();
    assert.deepEqual(await beyond(".empty"), []);
    // During a store outage the reason is longer than its space.
    await redis.stop();
    const pill = page.locator(".pill.unhealthy");
    await pill.waitFor();
    const [bad, theme] = [await pill.boundingBox(), await page.getByRole("button", { name: "Dark theme" }).boundingBox()];
    assert.ok(bad.x + bad.width <= theme.x && bad.y < theme.y + theme.height && theme.y < bad.y + bad.height, `in one line: ${JSON.stringify([bad, theme])}`);
    await redis.again();
    await pill.waitFor({ state: "detached" });

    const name = "n".repeat(512);
    await place.post(`/api/v1/locks/${name}/acquire`, { ttl_ms: 600_000, owner: "o".repeat(200) });
    await row(page, name).tap();
    const drawer = page.locator(".drawer");
    await drawer.getByRole("button", { name: "Evict…" }).tap();
    const dialog = page.getByRole("dialog", { name: /^Take n+ away from o+$/ });
    await dialog.getByLabel(/^Reason/).fill("too long");
    assert.deepEqual(await beyond("dialog.evict"), []);
    const cancel = dialog.getByRole("button", { name: "Cancel" });
    await cancel.scrollIntoViewIfNeeded();
    const box = await cancel.boundingBox();
    assert.ok(box.x >= 0 && box.x + box.width <= 360, JSON.stringify(box));
    await dialog.getByRole("button", { name: /^Revoke o+$/ }).tap();
    await drawer.getByText("held, revoked: its holder has been told to stop").waitFor();
    clean(page);
  });

  test("the empty page: copying the command, no alerts, and the stored theme", async (t) => {
    const place = await Place.start(t);
    const page = await openPage(chrome, place.url, { permissions: ["clipboard-read", "clipboard-write"] });
    await page.getByRole("button", { name: /^Copy leasehold run/ }).click();
    await page.getByText("Copied.").waitFor();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "leasehold run my-first-lock -- sleep 60");
    await page.getByText("New events appear here.").waitFor();
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await ground();
    await page.getByRole("button", { name: "Dark theme" }).click();
    const dark = await until("it is dark", async () => (await ground()) !== light && (await ground()));
    await page.reload();
    await page.getByRole("button", { name: "Light theme" }).waitFor();
    assert.equal(await ground(), dark);
    clean(page);
  });
});
