// Evictions: the dialog explains the consequences, and evicts exactly the holder that it shows.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Place, browser, clean, openPage, row, until } from "./support.mjs";

let chrome;
before(async () => (chrome = await browser()));
after(() => chrome.close());

/** A lock with a holder and a waiter. */
async function contended(place, name, holder, waiter) {
  const first = place.hold(name, holder);
  await until(`${holder} holds it`, async () => (await place.lock(name)).owner?.startsWith(holder));
  const second = place.hold(name, waiter);
  await until(`${waiter} waits`, async () => (await place.lock(name)).waiters.length === 1);
  return [first, second];
}

const holds = (place, name, owner) => until(`${owner} holds ${name}`, async () => (await place.lock(name)).owner?.startsWith(owner));
const audit = (place) => readFileSync(join(place.dir, "audit.jsonl"), "utf8").trim().split("\n").map((line) => JSON.parse(line));

// Each test has its own store and server.
describe("taking a lock away", { concurrency: 3 }, () => {
  test("revoke and force name the holder and the next one, and evict", async (t) => {
    const place = await Place.start(t);
    await contended(place, "gpu_lock:0", "tts-worker-3", "ocr-worker-1");
    const page = await openPage(chrome, place.url);
    await row(page, "gpu_lock:0").click();
    const drawer = page.locator(".drawer");
    await drawer.getByText(/^1\.?$|ocr-worker-1@/).first().waitFor();
    await drawer.getByRole("button", { name: "Evict…" }).click();
    const dialog = page.getByRole("dialog", { name: "Take gpu_lock:0 away from tts-worker-3" });
    const revoke = await dialog.locator(".choice").first().innerText();
    assert.match(revoke, /^Revoke:? tts-worker-3 is told to stop; ocr-worker-1 enters when it has, at the latest in \d+s\.$/);
    const force = await dialog.locator(".choice").last().innerText();
    assert.match(force, /^Force:? ocr-worker-1 enters now\. tts-worker-3 may still be running \(last sign of life \d+s ago\): only fences protect what it writes\.$/);
    const agree = dialog.getByRole("button", { name: "Revoke tts-worker-3" });
    assert.ok(await agree.isDisabled(), "without a reason nothing is done");
    await dialog.getByLabel(/^Reason/).fill("it hangs");
    await agree.click();
    await page.getByText(/tts-worker-3@.* has been told to stop\./).waitFor();
    await holds(place, "gpu_lock:0", "ocr-worker-1");

    // Now force out the new holder.
    const old = await place.lock("gpu_lock:0");
    place.hold("gpu_lock:0", "whisper-2");
    await until("whisper-2 waits", async () => (await place.lock("gpu_lock:0")).waiters.length === 1);
    await drawer.locator(".holder").getByText(/ocr-worker-1@/).waitFor();
    await drawer.getByRole("button", { name: "Evict…" }).click();
    const second = page.getByRole("dialog", { name: "Take gpu_lock:0 away from ocr-worker-1" });
    await second.getByLabel(/^Reason/).fill("its host is gone");
    await second.locator("input[value=force]").check();
    const push = second.getByRole("button", { name: "Force ocr-worker-1 out" });
    assert.ok(await push.isDisabled(), "the name has to be typed");
    await second.getByLabel(/^Type the lock's name/).fill("gpu_lock:1");
    assert.ok(await push.isDisabled(), "the right one");
    await second.getByLabel(/^Type the lock's name/).fill("gpu_lock:0");
    await push.click();
    await holds(place, "gpu_lock:0", "whisper-2");

    const lines = audit(place);
    const entries = lines.map(({ action, outcome, reason }) => `${action} ${outcome} ${reason}`);
    assert.deepEqual(entries, ["revoke asked it hangs", "revoke revoked it hangs", "force asked its host is gone", "force forced its host is gone"]);
    assert.equal(lines[3].holder_id, old.holder_id);
    const ends = await until("both ends are known", async () => {
      const { tenures } = await place.get("/api/v1/timeline");
      const [one, two] = tenures.sort((a, b) => a.since_ms - b.since_ms);
      return one.end === "revoked" && two.end === "forced" && [one.end, two.end];
    });
    assert.deepEqual(ends, ["revoked", "forced"]);
    await drawer.getByRole("cell", { name: "revoked" }).waitFor();
    await drawer.getByRole("cell", { name: "forced" }).waitFor();
    assert.equal((await place.get("/api/v1/overview")).bad_ends_last_hour, 2);
    clean(page);
  });

  test("if the lock changes hands while the dialog is open, nothing is evicted", async (t) => {
    const place = await Place.start(t);
    const [carol] = await contended(place, "deploy", "carol", "dave");
    const page = await openPage(chrome, place.url);
    await row(page, "deploy").click();
    await page.getByRole("button", { name: "Evict…" }).click();
    const dialog = page.getByRole("dialog", { name: "Take deploy away from carol" });
    await dialog.getByLabel(/^Reason/).fill("carol hangs");
    const agree = dialog.getByRole("button", { name: "Revoke carol" });
    assert.ok(await agree.isEnabled());
    await place.stop(carol, "SIGINT");
    await dialog.getByText(/Changed hands\. dave@.* holds it now; nothing was done/).waitFor();
    assert.ok(await agree.isDisabled());
    await dialog.getByRole("button", { name: "Close" }).click();
    await holds(place, "deploy", "dave");

    // The page does not know yet; the server compares the holder id.
    const dave = await place.lock("deploy");
    const [erin] = [place.hold("deploy", "erin")];
    await until("erin waits", async () => (await place.lock("deploy")).waiters.length === 1);
    await page.locator(".drawer .holder").getByText(/dave@/).waitFor();
    await page.getByRole("button", { name: "Evict…" }).click();
    const late = page.getByRole("dialog", { name: "Take deploy away from dave" });
    await late.getByLabel(/^Reason/).fill("dave hangs");
    await page.route("**/api/v1/locks/deploy", (route) => route.fulfill({ contentType: "application/json", body: JSON.stringify(dave) }));
    await place.post("/api/v1/locks/deploy/evict", { holder_id: dave.holder_id, mode: "force", reason: "by somebody else" });
    await holds(place, "deploy", "erin");
    await late.getByRole("button", { name: "Revoke dave" }).click();
    await late.getByText(/deploy has changed hands: erin@.* holds it now; nothing was done/).waitFor();
    const now = await place.lock("deploy");
    assert.match(now.owner, /^erin@/);
    assert.equal(now.revoked, false, "erin was not touched");
    assert.equal(erin.exitCode, null);
    assert.equal(audit(place).at(-1).outcome, "changed_hands");
    clean(page);
  });
});
