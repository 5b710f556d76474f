package admission

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/transcript"
)

// TestTranscripts plays the scripts in testdata:
//
//	gate TOTAL PER-SOURCE [NUMBER...]   a new gate; what is drawn, 0 when the numbers are used up
//	arrive PEER@SOURCE...               leave PEER
//	expect NUMBER                       so many may come at once
//	show                                who has a place, by source, the oldest first
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		var g *Gate[string]
		return func(words []string) (said []string) {
			switch words[0] {
			case "gate":
				drawn := words[3:]
				g = New[string](Bounds{number(t, words[1]), number(t, words[2])}, func(n int) int {
					if len(drawn) == 0 {
						return 0
					}
					next := drawn[0]
					drawn = drawn[1:]
					return min(number(t, next), n-1)
				})
			case "arrive":
				for _, word := range words[1:] {
					peer, source, _ := strings.Cut(word, "@")
					if dropped, full := g.Arrive(peer, source); full {
						said = append(said, dropped+" makes room for "+peer)
					}
				}
			case "expect":
				g.Expect(number(t, words[1]))
				said = append(said, fmt.Sprintf("%d are kept, %d of a source", g.Bounds().Total, g.Bounds().PerSource))
			case "leave":
				if !g.Leave(words[1]) {
					said = append(said, words[1]+" has no place")
				}
			case "show":
				for source, peers := range g.sources {
					said = append(said, fmt.Sprint(source, ": ", strings.Join(peers, " ")))
				}
				slices.Sort(said)
			default:
				t.Fatalf("unknown command %q", words[0])
			}
			return said
		}
	})
}

func number(t *testing.T, word string) int {
	n, err := strconv.Atoi(word)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestAnHonestPeerMostlyOutlivesTheFloodOfItsOwnAddress: flooders arrive without end while an honest peer needs a fixed
// number of their arrivals for its handshake. What is checked is the share of attempts that succeed.
func TestAnHonestPeerMostlyOutlivesTheFloodOfItsOwnAddress(t *testing.T) {
	draw := rand.New(rand.NewPCG(1, 2))
	for arrivals, want := range map[int]float64{20: 0.95, 100: 0.75, 400: 0.05} {
		const attempts = 500
		g := New[int](Bounds{256, 192}, draw.IntN)
		next, through := 0, 0
		flood := func(n int) {
			for range n {
				next++
				g.Arrive(next, "here")
			}
		}
		flood(5000)
		for range attempts {
			next++
			honest := next
			g.Arrive(honest, "here")
			flood(arrivals)
			if g.Leave(honest) {
				through++
			}
			flood(500)
		}
		if share := float64(through) / attempts; share < want {
			t.Errorf("%.2f of the attempts get through while %d others arrive, want %.2f", share, arrivals, want)
		}
	}
}

func TestAmongAddressesOfOnePeerEachNoneIsCertainToLose(t *testing.T) {
	for drawn, want := range map[int]string{0: "a", 2: "c", 3: "d"} {
		g := New[string](Bounds{4, 2}, func(n int) int { return min(drawn, n-1) })
		for _, peer := range []string{"d", "b", "a", "c"} {
			g.Arrive(peer, peer)
		}
		if dropped, full := g.Arrive("e", "e"); !full || dropped != want {
			t.Errorf("draw %d: %q makes room, want %q", drawn, dropped, want)
		}
	}
}
