import process from "node:process";
import { defineConfig } from "vite";

// The server embeds the page, so it is built into the server crate. File names are fixed, because the server adds the
// hashes: a rebuild changes only the files whose content changed.
export default defineConfig({
  build: {
    outDir: "../crates/leasehold-server/page",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    rolldownOptions: {
      output: {
        entryFileNames: "assets/page.js",
        assetFileNames: "assets/page[extname]",
        codeSplitting: false,
      },
    },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  server: { proxy: { "/api": process.env.LEASEHOLD_SERVER ?? "http://127.0.0.1:8847" } },
});
