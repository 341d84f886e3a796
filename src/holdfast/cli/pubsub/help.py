"""Texts of `holdfast pub --help` and `holdfast sub --help`."""

from typing import Final

_CONNECTION: Final = """\
Connection:
  -h, --host HOST            server (default localhost)
  -p, --port PORT            port (default 1883, with TLS 8883)
  -L, --url URL              mqtt(s)://[username[:password]@]host[:port]/topic
  --server URL               a server to choose from, beside that of -h and -p; may be repeated:
                             HOST[:PORT], mqtt(s)://HOST[:PORT], ws(s)://HOST[:PORT][/PATH]
  -A ADDRESS                 local address to connect from
  -i, --id ID                client id (default: the server assigns one)
  -I, --id-prefix PREFIX     client id of this prefix and the process id
  -u, --username NAME        user name
  -P, --pw PASSWORD          password
  -V, --protocol-version V   5, 311 (default) or 31; also mqttv5, mqttv311, mqttv31
  -k, --keepalive SECONDS    5 to 65535 (default 60)
  -c                         keep the session on the server (--disable-clean-session)
  -x SECONDS                 session expiry (MQTT 5); -1 or ∞: never
  -D, --property COMMAND NAME VALUE
                             an MQTT 5 property, e.g. -D publish content-type text/plain
  --will-topic TOPIC         with --will-payload TEXT, --will-qos QOS, --will-retain
  -d, --debug                print every packet
  --quiet                    no error messages while running
  --version, --help

TLS (--cafile, --capath, --tls-use-os-certs, an mqtts URL, or --server wss://... switch it on):
  --cafile FILE, --capath DIR, --tls-use-os-certs    CA certificates
  --cert FILE, --key FILE    client certificate
  --insecure                 do not check the name in the server's certificate
  --tls-version V            at least this: tlsv1.3, tlsv1.2 (default), tlsv1.1
  --ciphers LIST, --tls-alpn PROTOCOL
"""

PUB_USAGE: Final = (
    """\
usage: holdfast pub [-h HOST] [-p PORT] -t TOPIC (-m TEXT | -f FILE | -l | -s | -n) [options]

Publish messages; options, output and exit codes are those of mosquitto_pub. A lost connection is
made again, to any of the servers; what was not acknowledged is sent again.

  -t, --topic TOPIC          topic to publish to
  -m, --message TEXT         the message
  -f, --file FILE            ... is the content of a file
  -l, --stdin-line           ... each line of standard input
  -s, --stdin-file           ... the whole standard input
  -n, --null-message         ... is empty (with -r: clears a retained message)
  -q, --qos QOS              0 (default), 1 or 2
  -r, --retain               retain the message
  -M COUNT                   messages without acknowledgement at a time (default 20)
  --repeat COUNT             publish so many times (not with -l)
  --repeat-delay SECONDS     between them

"""
    + _CONNECTION
    + """
Exit codes: 0 published; 1 wrong use or no connection; 7 connection lost; 8 TLS failed; the CONNACK
code if the server refused the connection.
"""
)

SUB_USAGE: Final = (
    """\
usage: holdfast sub [-h HOST] [-p PORT] -t FILTER... [options]

Subscribe and print messages; options, output and exit codes are those of mosquitto_sub. A lost
connection is made again, to any of the servers.

  -t, --topic FILTER         topic filter; may be repeated
  -T, --filter-out FILTER    do not print what matches; may be repeated
  -U, --unsubscribe FILTER   unsubscribe after subscribing; may be repeated
  -q, --qos QOS              0 (default), 1 or 2
  -C COUNT                   exit after so many messages
  -W SECONDS                 exit with 27 after this time
  --since START              begin in the past: earliest, -15m, a Unix time, 2026-01-31T12:00:00Z,
                             last:N, offsets:PARTITION:OFFSET,...
  --last N                   begin with the last N messages of each topic
  --until TIME               print messages up to this time, or now, and exit (MQTT 5); from the
                             earliest one on without --since
  -E                         exit once subscribed
  -v, --verbose              print the topic before the message
  -F FORMAT                  print each message in this form (below)
  -N                         no newline after a message
  --pretty                   indent the JSON of %j and %J
  -R                         do not print retained messages
  --retained-only            print only retained messages, exit at the first other one
  --remove-retained          clear the retained messages that are received
  --retain-as-published      keep the publisher's retain flag (MQTT 5)
  --retain-handling WHEN     retained messages are sent: always, new (subscriptions), never (MQTT 5)
  --random-filter PERCENT    print only this part of the messages, 0.1 to 100

Format: %t topic, %p payload, %x %X payload in hex, %l payload length, %q QoS, %r retain, %m packet
id, %j JSON, %J JSON with a JSON payload, %I ISO time, %U Unix time, %A topic alias, %C content
type, %D correlation data, %E message expiry, %F payload format, %P user properties, %R response
topic, %S subscription identifier, %% percent; @X strftime's %X, @N nanoseconds, @@ at;
\\\\ \\0 \\a \\e \\n \\r \\t \\v. Width and flags as in printf: %-10t, %05l, %.3t.

"""
    + _CONNECTION
    + """
Exit codes: 0 done; 1 wrong use or no connection; 8 TLS failed; 27 timed out (-W); the CONNACK code
if the server refused the connection.
"""
)
