package transporttest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/paceline/paceline/transport/stream"
)

// fault is one line of a script.
type fault struct {
	after int64 // bytes on the link, counted from its beginning
	what  string
	count int // argument of garbage and rate
}

// Script schedules faults. Each line says when, on which link, and what:
//
//	after 1000  worker0->server0   cut         # the connection ends behind these bytes, as if the peer had closed it
//	after 1000  worker0->server0   reset       # the connection breaks, and what is in flight is lost
//	after 64    worker0->server0   garbage 16  # so many bytes are inserted into the stream
//	after 64    worker0->server0   freeze      # from here on nothing arrives, and no end is notified: half-open
//	write 1000  worker0->server0   cut         # the sender dies in the middle of a one-sided write, behind these bytes of it
//	at 2s       worker0<->server0  freeze      # both directions: a network partition
//	at 5s       worker0<->server0  thaw        # what was sent meanwhile arrives
//	at 0s       worker0->server0   rate 1000   # bytes per second: a slow reader, or a slow link; 0 is no limit
//	after 1000  worker0->server0   stop        # the node that sends them is stopped, as a process by SIGSTOP (stops.go)
//	at 2s       worker0            stop
//	at 5s       worker0            continue
//
// "after" counts the bytes of all connections on the link from the call of Script on, "write" those of one-sided
// writes alone, and the connection that sends the last of them is the one that cut, reset and garbage strike; "at", which
// also starts at the call, has them strike every connection on the link. A link that stays frozen for
// longer than stream.Tolerance ends its connections on both sides.
func (n *Network) Script(script string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for number, line := range strings.Split(script, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if words := strings.Fields(line); len(words) > 0 {
			if err := n.traffic.schedule(words); err != nil {
				return fmt.Errorf("line %d of the script, %q: %w", number+1, strings.TrimSpace(line), err)
			}
		}
	}
	return nil
}

// schedule parses one line.
func (t *traffic) schedule(words []string) error {
	if len(words) < 4 {
		return fmt.Errorf("want: at TIME, after BYTES or write BYTES, a link or a node, a fault")
	}
	f, err := parseFault(words[3:])
	if err != nil {
		return err
	}
	paths := []path{{from: words[2]}}
	if node := words[0] == "at" && !strings.Contains(words[2], "->") && (f.what == "stop" || f.what == "continue"); !node {
		if paths, err = parseLink(words[2]); err != nil {
			return err
		}
	}
	switch words[0] {
	case "at":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		t.after(d, func() {
			for _, p := range paths {
				t.strikeAll(p, f)
			}
		})
	case "after", "write":
		bytes, err := strconv.ParseInt(words[1], 10, 64)
		if err != nil {
			return err
		}
		for _, p := range paths {
			if words[0] == "write" {
				t.link(p).writes.schedule(f, bytes)
			} else {
				t.link(p).all.schedule(f, bytes)
			}
		}
	default:
		return fmt.Errorf("%q is none of at, after and write", words[0])
	}
	return nil
}

// parseLink parses "a->b" and "a<->b".
func parseLink(s string) ([]path, error) {
	from, to, ok := strings.Cut(s, "->")
	from, both := strings.CutSuffix(from, "<")
	if !ok || from == "" || to == "" {
		return nil, fmt.Errorf("%q is no link such as a->b or a<->b", s)
	}
	p := path{from, to}
	if both {
		return []path{p, p.back()}, nil
	}
	return []path{p}, nil
}

// parseFault parses the words behind the link.
func parseFault(words []string) (f fault, err error) {
	arguments := map[string]int{"cut": 0, "reset": 0, "freeze": 0, "thaw": 0, "stop": 0, "continue": 0, "garbage": 1, "rate": 1}
	f.what = words[0]
	want, known := arguments[f.what]
	if !known {
		return f, fmt.Errorf("%q is no fault: there are cut, reset, garbage, freeze, thaw, rate, stop and continue", f.what)
	}
	if len(words) != 1+want {
		return f, fmt.Errorf("%s needs %d numbers, not %d", f.what, want, len(words)-1)
	}
	if want == 1 {
		if f.count, err = strconv.Atoi(words[1]); err == nil && f.count < 0 {
			err = fmt.Errorf("%d is negative", f.count)
		}
	}
	return f, err
}

// meter counts bytes, and holds the faults that are due after a number of them.
type meter struct {
	passed int64
	faults []fault
}

func (m *meter) schedule(f fault, bytes int64) {
	f.after = m.passed + bytes
	m.faults = append(m.faults, f)
	slices.SortStableFunc(m.faults, func(a, b fault) int { return int(a.after - b.after) })
}

// before is n, or fewer bytes where a fault comes before.
func (m *meter) before(n int) int {
	if len(m.faults) == 0 {
		return n
	}
	return int(min(int64(n), m.faults[0].after-m.passed))
}

// due removes the next fault if its bytes have passed.
func (m *meter) due() (f fault, ok bool) {
	if ok = len(m.faults) > 0 && m.faults[0].after == m.passed; ok {
		f, m.faults = m.faults[0], m.faults[1:]
	}
	return f, ok
}

// beforeFault is how many of n bytes, of a one-sided write or not, can be sent before the next fault.
func (l *link) beforeFault(n int, written bool) int {
	if written {
		n = l.writes.before(n)
	}
	return l.all.before(n)
}

// passed counts bytes that were sent.
func (l *link) passed(n int, written bool) {
	l.all.passed += int64(n)
	if written {
		l.writes.passed += int64(n)
	}
}

// strike applies the next fault of the link to a connection, and reports whether one was due.
func (t *traffic) strike(e *end, l *link, written bool) bool {
	f, due := l.all.due()
	if !due && written {
		f, due = l.writes.due()
	}
	if due {
		t.happen(e.out, e, f)
	}
	return due
}

// strikeAll applies a fault to every connection of a path.
func (t *traffic) strikeAll(p path, f fault) {
	if f.what != "cut" && f.what != "reset" && f.what != "garbage" {
		t.change(p, f)
		return
	}
	for _, e := range t.between(p) {
		out := e.out
		if out.path != p {
			out = e.in
		}
		t.happen(out, e, f)
	}
}

// happen applies a fault to the connection of e on its lane out.
func (t *traffic) happen(out *lane, e *end, f fault) {
	switch f.what {
	case "cut":
		for _, l := range []*lane{e.in, e.out} {
			l.queue(chunk{fin: true})
			l.gone = time.Now()
			signal(l.writable)
		}
	case "reset":
		e.fail(syscall.ECONNRESET)
	case "garbage":
		noise := make([]byte, f.count)
		random := rand.NewChaCha8([32]byte{}) // the same in each run
		random.Read(noise)
		out.queue(chunk{data: noise})
	default:
		t.change(out.path, f)
	}
}

// change applies a fault to a whole link, or to the node that sends on it.
func (t *traffic) change(p path, f fault) {
	l := t.link(p)
	switch {
	case f.what == "stop":
		t.stop(p.from)
	case f.what == "continue":
		t.goOn(p.from)
	case f.what == "rate":
		l.bandwidth = f.count
	case f.what == "freeze" && l.thawed == nil:
		thawed := make(chan struct{})
		l.thawed = thawed
		t.after(stream.Tolerance(t.PeerTimeout), func() {
			if l.thawed == thawed { // still the same freeze
				for _, e := range t.between(p) {
					e.fail(syscall.ETIMEDOUT)
				}
			}
		})
	case f.what == "thaw" && l.thawed != nil:
		close(l.thawed)
		l.thawed = nil
		for _, e := range t.between(p) {
			for _, lane := range []*lane{e.in, e.out} {
				if lane.link == l {
					lane.thaw()
				}
			}
		}
	}
}
