import process from "node:process";
import { defineConfig } from "vite";

// The server carries the page inside itself, so it is built to where the server's sources are. Names are fixed:
// the server adds the hashes, and a rebuild changes no file that did not change.
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
