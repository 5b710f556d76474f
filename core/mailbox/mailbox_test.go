package mailbox

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/paceline/paceline/internal/transcript"
)

// TestTranscripts plays the scripts in testdata to the box of rank 0:
//
//	new RANKS             a job of so many
//	send FROM TAG NUMBER [kept]: a message; one that is kept survives its sender
//	receive FROM|any TAG NUMBER
//	withdraw-send FROM TAG NUMBER     withdraw-receive FROM|any TAG NUMBER
//	leave RANK                        empty: what waits
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		var b *Box[string, string]
		return func(words []string) (said []string) {
			n := func(i int) int {
				if words[i] == "any" {
					return Any
				}
				v, err := strconv.Atoi(words[i])
				if err != nil {
					t.Fatal(err)
				}
				return v
			}
			switch words[0] {
			case "new":
				b = New[string, string](0, n(1))
			case "send":
				m := fmt.Sprintf("message %s of rank %s", words[3], words[1])
				if len(words) > 4 {
					m += ", kept"
				}
				if r, ok := b.Claim(n(1), uint64(n(2))); ok {
					return []string{r + " takes " + m}
				}
				b.Put(n(1), uint64(n(2)), uint64(n(3)), m)
			case "receive":
				r := "receive " + words[3]
				switch m, fate := b.Receive(n(1), uint64(n(2)), uint64(n(3)), r); fate {
				case Matched:
					return []string{r + " takes " + m}
				case Gone:
					return []string{r + " fails"}
				}
			case "withdraw-send":
				m, ok := b.WithdrawMessage(n(1), uint64(n(2)), uint64(n(3)))
				return []string{fmt.Sprintf("%q, %v", m, ok)}
			case "withdraw-receive":
				r, ok := b.WithdrawReceive(n(1), uint64(n(2)), uint64(n(3)))
				return []string{fmt.Sprintf("%q, %v", r, ok)}
			case "leave":
				dropped, failed := b.Leave(n(1), func(m string) bool { return !slices.Contains([]byte(m), ',') })
				return append(each("dropped: ", dropped), each("fails: ", failed)...)
			case "empty":
				messages, receives := b.Empty()
				return append(each("", messages), each("", receives)...)
			default:
				t.Fatalf("%q?", words)
			}
			return nil
		}
	})
}

func each(prefix string, texts []string) (lines []string) {
	slices.Sort(texts)
	for _, text := range texts {
		lines = append(lines, prefix+text)
	}
	return lines
}

// naive is the rules as they are stated: all messages and all receives in the order of their coming.
type naive struct {
	size               int
	gone               map[int]bool
	messages, receives []item
}

type item struct {
	from        int
	tag, number uint64
}

func (r item) takes(m item) bool { return r.tag == m.tag && (r.from == Any || r.from == m.from) }

func (n *naive) unreachable(from int) bool {
	return n.gone[from] || from == Any && len(n.gone) == n.size-1
}

// TestRandomSchedulesFollowTheRules plays random schedules to a box and to the rules as they are stated.
func TestRandomSchedulesFollowTheRules(t *testing.T) {
	for range 2000 {
		seed := rand.Uint64()
		if err := play(rand.New(rand.NewPCG(seed, 0))); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func play(random *rand.Rand) error {
	n := &naive{size: 2 + random.IntN(3), gone: map[int]bool{}}
	b := New[item, item](0, n.size)
	for step := range uint64(200) {
		x := item{random.IntN(n.size), random.Uint64N(3), step}
		var err error
		switch choice := random.IntN(20); {
		case choice < 8:
			err = n.send(b, x)
		case choice < 16:
			if random.IntN(3) == 0 {
				x.from = Any
			}
			err = n.receive(b, x)
		case choice < 19:
			err = n.withdraw(b, random)
		case random.IntN(10) == 0 && x.from > 0:
			err = n.leave(b, x.from)
		}
		if err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
	}
	messages, receives := b.Empty()
	if len(messages) != len(n.messages) || len(receives) != len(n.receives) || len(b.tags) > 0 {
		return fmt.Errorf("%d messages and %d receives wait, want %d and %d", len(messages), len(receives), len(n.messages), len(n.receives))
	}
	return nil
}

func (n *naive) send(b *Box[item, item], m item) error {
	if n.gone[m.from] {
		return nil
	}
	i := slices.IndexFunc(n.receives, func(r item) bool { return r.takes(m) })
	r, ok := b.Claim(m.from, m.tag)
	switch {
	case ok != (i >= 0) || ok && r != n.receives[i]:
		return fmt.Errorf("%v is claimed by %v, %v, want receive %d of %v", m, r, ok, i, n.receives)
	case ok:
		n.receives = slices.Delete(n.receives, i, i+1)
	default:
		b.Put(m.from, m.tag, m.number, m)
		n.messages = append(n.messages, m)
	}
	return nil
}

func (n *naive) receive(b *Box[item, item], r item) error {
	i := slices.IndexFunc(n.messages, r.takes)
	m, fate := b.Receive(r.from, r.tag, r.number, r)
	switch {
	case (fate == Matched) != (i >= 0) || i >= 0 && m != n.messages[i]:
		return fmt.Errorf("%v takes %v, %v, want message %d of %v", r, m, fate, i, n.messages)
	case i >= 0:
		n.messages = slices.Delete(n.messages, i, i+1)
	case (fate == Gone) != n.unreachable(r.from):
		return fmt.Errorf("fate %v of %v, where %v have gone", fate, r, n.gone)
	case fate == Waits:
		n.receives = append(n.receives, r)
	}
	return nil
}

func (n *naive) withdraw(b *Box[item, item], random *rand.Rand) error {
	if len(n.messages) > 0 {
		i := random.IntN(len(n.messages))
		m := n.messages[i]
		if got, ok := b.WithdrawMessage(m.from, m.tag, m.number); !ok || got != m {
			return fmt.Errorf("%v is withdrawn: %v, %v", m, got, ok)
		}
		n.messages = slices.Delete(n.messages, i, i+1)
	}
	if len(n.receives) > 0 {
		i := random.IntN(len(n.receives))
		r := n.receives[i]
		if got, ok := b.WithdrawReceive(r.from, r.tag, r.number); !ok || got != r {
			return fmt.Errorf("%v is withdrawn: %v, %v", r, got, ok)
		}
		n.receives = slices.Delete(n.receives, i, i+1)
	}
	return nil
}

// leave has a rank go, with its messages of odd numbers.
func (n *naive) leave(b *Box[item, item], rank int) error {
	n.gone[rank] = true
	went := func(m item) bool { return m.number%2 == 1 }
	dropped, failed := b.Leave(rank, went)
	before := len(n.messages) + len(n.receives)
	n.messages = slices.DeleteFunc(n.messages, func(m item) bool { return m.from == rank && went(m) })
	n.receives = slices.DeleteFunc(n.receives, func(r item) bool { return n.unreachable(r.from) })
	if got, want := len(dropped)+len(failed), before-len(n.messages)-len(n.receives); got != want {
		return fmt.Errorf("rank %d goes: %v are dropped and %v fail, want %d in all", rank, dropped, failed, want)
	}
	return nil
}
