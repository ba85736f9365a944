# As much of Node, with pi in it, as a trial needs: it asks its model once.
[ "$1" = --version ] && echo v22.19.0 && exit
exec python3 - <<'EOF'
import json, os, urllib.error, urllib.request
folder = os.environ["PI_CODING_AGENT_DIR"]
url = json.load(open(f"{folder}/models.json"))["providers"]["tugline"]["baseUrl"]
try:
    urllib.request.urlopen(f"{url}/chat/completions", data=b"{}")
except urllib.error.HTTPError:
    pass
EOF
