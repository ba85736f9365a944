import { defineConfig, type Plugin } from "vite";
import shared from "./vite.config.ts";

/** A source of a content security policy that allows one inline script or style. */
async function allow(text: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return `'sha256-${btoa(String.fromCharCode(...new Uint8Array(digest)))}'`;
}

/** Put scripts and styles into the HTML files, which can then run and apply nothing else. */
const inline: Plugin = {
  name: "inline",
  enforce: "post",
  async generateBundle(_, bundle) {
    const read = (address: string): string => {
      const file = bundle[address.slice(1)]!;
      return (file.type === "chunk" ? file.code : String(file.source)).trim();
    };
    for (const [name, page] of Object.entries(bundle)) {
      if (page.type !== "asset" || !name.endsWith(".html")) continue;
      let style = "";
      let script = "";
      const rest = String(page.source)
        .replace(/ *<link rel="stylesheet"[^>]* href="([^"]+)">\n/, (_, address) => {
          style = read(address);
          return "";
        })
        .replace(/ *<script type="module"[^>]* src="([^"]+)"><\/script>\n/, (_, address) => {
          script = read(address).replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
          return "";
        });
      if (/<link |<script [^>]*src=/.test(rest)) throw new Error(`${name} still needs another file`);
      const [scripts, styles] = [await allow(script), await allow(style)];
      page.source = rest
        .replace("SCRIPTS", scripts)
        .replace("STYLES", styles)
        .replace("</head>", () => `  <style>${style}</style>\n  </head>`)
        .replace("</body>", () => `${script && `  <script type="module">${script}</script>\n  `}</body>`);
    }
    for (const name of Object.keys(bundle)) if (!name.endsWith(".html")) delete bundle[name];
  },
};

// The pages of `tugline view --html`, each in one file. Python fills in their `{{ names }}`.
export default defineConfig({
  ...shared,
  plugins: [...(shared.plugins ?? []), inline],
  build: {
    ...shared.build,
    outDir: "../src/tugline/recording/view/pages",
    rolldownOptions: { input: ["session.html", "run.html"] },
  },
});
