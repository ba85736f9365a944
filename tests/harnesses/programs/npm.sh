# As much of npm as an installation of pi needs.
mkdir -p node_modules/@earendil-works/pi-coding-agent
cd node_modules/@earendil-works/pi-coding-agent
touch cli.js && echo '{"bin": {"pi": "cli.js"}}' > package.json
