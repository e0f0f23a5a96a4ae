// Accessibility, and the screenshots in docs/.
import assert from "node:assert/strict";
import { readFileSync, statSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { Place, Redis, browser, clean, openPage, root, row, sleep } from "./support.mjs";
import { lively, still } from "./scene.mjs";

const axePath = createRequire(import.meta.url).resolve("axe-core/axe.min.js");

let chrome;
before(async () => (chrome = await browser()));
after(() => chrome.close());

const LOOKS = [
  { name: "light", options: { colorScheme: "light" } },
  { name: "dark", options: { colorScheme: "dark" } },
  { name: "narrow", options: { colorScheme: "light", viewport: { width: 390, height: 844 }, deviceScaleFactor: 2 } },
];

/** Checks of axe-core that passed. */
let checks = 0;

/** Runs axe-core. The content security policy blocks other scripts, so it is injected through the debugger. */
async function axe(page, where) {
  await page.evaluate(readFileSync(axePath, "utf8"));
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const violations = found.violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.slice(0, 3).map((node) => `${node.target} ${node.any[0]?.message ?? ""}`).join(" | ")}`);
  assert.deepEqual(violations, [], where);
  checks += found.passes.length;
}

test("axe-core finds nothing, in light, dark and narrow", async (t) => {
  const place = await still(t);
  const look = async ({ name, options }) => {
    // Animated colours would fail the contrast check.
    const page = await openPage(chrome, place.url, { ...options, reducedMotion: "reduce" });
    await row(page, "db-backup").waitFor();
    await row(page, "gpu_lock:7").waitFor();
    await page.getByText("live", { exact: true }).waitFor();
    await page.locator(".alert .level", { hasText: "warning" }).first().waitFor();
    await page.locator(".gpus").getByText("tts-worker-1").waitFor();
    await axe(page, name);
    await row(page, "gpu_lock:0").click();
    await page.locator(".drawer .tenures").waitFor();
    await axe(page, `${name}, drawer`);
    await page.getByRole("button", { name: "Evict…" }).click();
    await page.locator("input[value=force]").check();
    await axe(page, `${name}, evict`);
    await page.getByRole("button", { name: "Cancel" }).click();
    await page.locator("dialog").waitFor({ state: "detached" });
    await page.keyboard.press("Escape");
    await page.locator(".drawer").waitFor({ state: "detached" });
    await page.getByRole("tab", { name: /^Journal/ }).click();
    await page.getByRole("button", { name: "Settle…" }).click();
    await page.getByLabel("Reason").waitFor();
    await axe(page, `${name}, journal`);
    await page.getByRole("tab", { name: "Audit" }).click();
    await page.getByRole("cell", { name: "its host is gone" }).first().waitFor();
    await axe(page, `${name}, audit`);
    if (name !== "narrow") {
      await page.getByRole("button", { name: "Show table" }).click();
      await page.getByRole("cell", { name: "expired" }).first().waitFor();
      await axe(page, `${name}, timeline as a table`);
    }
    clean(page);
    await page.context().close();
  };
  await Promise.all(LOOKS.map(look));

  const empty = await Place.start(t);
  for (const colorScheme of ["light", "dark"]) {
    const page = await openPage(chrome, empty.url, { colorScheme, reducedMotion: "reduce" });
    await page.getByText("leasehold demo").waitFor();
    await axe(page, `${colorScheme}, empty`);
    await page.context().close();
  }
  console.log(`axe-core: 0 violations, ${checks} checks passed`);
});

const unwanted = process.env.LEASEHOLD_PICTURES ? false : "LEASEHOLD_PICTURES is not set: pictures differ by a machine's fonts";

test("the screenshots in docs/", { skip: unwanted }, async (t) => {
  const redis = await Redis.start(t);
  const place = await Place.start(t, { store: redis.url });
  lively(place);
  await sleep(80_000);
  for (const { name, options } of LOOKS) {
    const page = await openPage(chrome, place.url, options);
    await row(page, "db-backup").waitFor();
    await page.getByText("live", { exact: true }).waitFor();
    if (name !== "narrow") {
      // Show only the duration of the scene.
      for (let n = 0; n < 3; n += 1) await page.getByRole("button", { name: "Zoom in" }).click();
      await page.mouse.move(5, 500);
    }
    await sleep(6_000);
    const file = join(root, "docs", `dashboard-${name}.png`);
    await page.screenshot({ path: file });
    const { size } = statSync(file);
    console.log(`${name}: ${size} bytes`);
    assert.ok(size < 300_000, `${file}: ${size} bytes`);
    await page.context().close();
  }
});
