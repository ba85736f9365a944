import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The build is committed, so it must not depend on the machine: styles are named after their text.
export default defineConfig({
  plugins: [
    svelte({
      configFile: false,
      compilerOptions: { cssHash: ({ hash, css }) => `s-${hash(css)}` },
    }),
  ],
  logLevel: "warn",
  build: {
    outDir: "../src/tugline/server/console",
    emptyOutDir: true,
    assetsInlineLimit: 0, // `default-src 'self'` allows no data: URL
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  // `npx vite` with a running `tugline up`
  server: { proxy: { "/v1": "http://127.0.0.1:7700", "/metrics": "http://127.0.0.1:7700" } },
});
