# Makes one model call with nothing but bash, and prints the answer.
url=${OPENAI_BASE_URL#http://}; at=${url%%/*}
body='{"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Go on."}]}'
exec 3<>/dev/tcp/${at%:*}/${at#*:}
printf 'POST /%s/chat/completions HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n' "${url#*/}" $at >&3
printf 'authorization: Bearer %s\r\ncontent-type: application/json\r\n' "$OPENAI_API_KEY" >&3
printf 'content-length: %d\r\n\r\n%s' ${#body} "$body" >&3
cat <&3
