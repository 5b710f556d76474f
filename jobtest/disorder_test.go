package jobtest_test

import (
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

var (
	disorders    = flag.Int("disorders", 25, "how many seeds TestFramesMayComeLateAndInAnyOrder runs")
	disorderSeed = flag.Uint64("disorder", 0, "the first of them: a seed that failed")
)

// TestFramesMayComeLateAndInAnyOrder runs whole jobs in which frames of every type come late and overtake those of
// other connections, in virtual time. Each rank plays scenes (scenes_test.go) one after the other, as fast as it can, over
// several rounds of init and shutdown, so that what is late of one scene comes in the midst of those that follow: after a cancel, a
// join, a departure, the end of a name's generation, the removal of a process set, a goodbye, the next init.
//
// Whatever the order: no connection ends because a peer broke the protocol, every operation ends, and with the right result.
func TestFramesMayComeLateAndInAnyOrder(t *testing.T) {
	var mu sync.Mutex
	read := map[wire.Type]int{}
	for i := range *disorders {
		seed := *disorderSeed + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDisorder(t, seed)
				d.watch.Read = func(typ wire.Type) {
					mu.Lock()
					defer mu.Unlock()
					read[typ]++
				}
				d.run()
			})
			if t.Failed() {
				t.Logf("again: go test -tags invariants ./jobtest -run TestFramesMayComeLateAndInAnyOrder -disorder %d -disorders 1", seed)
			}
		})
	}
	elsewhere := []wire.Type{wire.TypeBeat, wire.TypeSupply, wire.TypeMoved, wire.TypeCover, wire.TypeResidual, wire.TypeReleased, wire.TypeTaken} // beats are the connections' own; no server is lost or joins here, nor is memory lent
	for _, typ := range wire.Types() {
		if read[typ] == 0 && *disorders >= 25 && !slices.Contains(elsewhere, typ) {
			t.Errorf("no %v frame was read in %d seeds: have a scene in which there are some", typ, *disorders)
		}
	}
	t.Log("frames read:", read)
}

// disorder is one seed: the job, its scenes, and who holds back which frames.
type disorder struct {
	*jobtest.Job
	seed    uint64
	network *transporttest.Network
	watch   *transporttest.Watch
	story   [][]scene // by round; the last of a round ends it

	mu       sync.Mutex
	draws    map[string]*rand.Rand       // by link and type
	all      map[wire.Type]time.Duration // what is held back on every connection
	broken   []string                    // what a node says of a peer that breaks the protocol
	starving map[int]bool                // ranks whose engine gets no memory
}

const scenesPerRound = 5

// Times of a job, all virtual. What is late comes behind all that is in time, and before a rank that is waited for is
// taken for a stalled one.
const (
	latest      = 100 * time.Millisecond
	warnsAfter  = time.Second
	stallsAfter = 20 * time.Second
)

func newDisorder(t *testing.T, seed uint64) *disorder {
	network := transporttest.NewNetwork(transporttest.Options{Latency: 20 * time.Microsecond})
	t.Cleanup(network.Close)
	d := &disorder{seed: seed, network: network, draws: map[string]*rand.Rand{}, all: map[wire.Type]time.Duration{}, starving: map[int]bool{}}
	d.watch = &transporttest.Watch{Hold: d.hold, Read: func(wire.Type) {}}
	random := d.random("job")
	places := []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(1), jobtest.Dedicated(2), jobtest.Both(1), jobtest.Pairs(1), jobtest.Pairs(2)}
	d.Job = jobtest.New(t, 2+random.IntN(3), jobtest.SmallPartitions, places[random.IntN(len(places))],
		jobtest.Stalls(warnsAfter, stallsAfter), jobtest.With(repeatable), jobtest.With(func(s *settings.Settings) {
			s.Connections = 1 + random.IntN(3)
			s.FusionBytes *= int64(random.IntN(2))
			s.CreditBytes = 3 * jobtest.Partition
			s.StartTimeout, s.PeerTimeout = 10*time.Minute, time.Minute
		}),
		jobtest.Transports(func(rank int) *transport.Set {
			return transport.NewSet(nil, network.Watched(nodeName(rank), []byte(jobtest.Secret), d.watch))
		}),
		func(j *jobtest.Job) {
			j.Log = zap.New(listener{zapcore.DebugLevel, d})
			j.ServerLog = j.Log
			j.Alloc = d.alloc
		})
	for range 1 + random.IntN(3) {
		var round []scene
		for range scenesPerRound {
			round = append(round, scenes[random.IntN(len(scenes))])
		}
		d.story = append(d.story, append(round, endings[random.IntN(len(endings))]))
	}
	if last := d.story[len(d.story)-1]; d.Settings.Servers == "dedicated" && random.IntN(3) == 0 {
		last[len(last)-1] = serverLeaves
	}
	return d
}

func nodeName(rank int) string {
	if rank < 0 {
		return "servers"
	}
	return fmt.Sprint("worker", rank)
}

// random draws from the seed, for a purpose.
func (d *disorder) random(purpose ...any) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprint(h, purpose...)
	return rand.New(rand.NewPCG(d.seed, h.Sum64()))
}

// stop has a node stopped for as long as its peers bear, in the midst of whatever the ranks play.
func (d *disorder) stop() (script string) {
	random := d.random("stop")
	node := nodeName(random.IntN(len(d.Workers)+1) - 1)
	at := time.Duration(random.Int64N(int64([]time.Duration{time.Millisecond, 20 * time.Millisecond, latest, 10 * latest}[random.IntN(4)])))
	return fmt.Sprintf("at %v %s stop\nat %v %s continue", at, node, at+stream.Tolerance(peerTimeout), node)
}

// peerTimeout is that of the network.
const peerTimeout = 10 * time.Second

// TestANodeMayBeStoppedForAsLongAsPeersBearAtAnyMoment: nothing is lost, and every operation has the result that it has without.
func TestANodeMayBeStoppedForAsLongAsPeersBearAtAnyMoment(t *testing.T) {
	for i := range *disorders {
		seed := *disorderSeed + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDisorder(t, seed)
				for i, round := range d.story {
					d.story[i] = slices.DeleteFunc(round, func(s scene) bool { return s.name == "stalled rank" || s.name == "join" }) // they are about time
				}
				script := d.stop()
				if err := d.network.Script(script); err != nil {
					t.Fatal(err)
				}
				d.run()
				if t.Failed() {
					t.Log(script)
				}
			})
		})
	}
}

// hold is how long a frame is held back. On each connection some types come at once, some late, and some are sometimes late.
func (d *disorder) hold(link string, typ wire.Type) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if long := d.all[typ]; long > 0 {
		return long
	}
	key := fmt.Sprint(link, " ", typ)
	r := d.draws[key]
	if r == nil {
		r = d.random("hold ", key)
		d.draws[key] = r
	}
	switch d.random("class ", key).IntN(10) {
	case 0, 1, 2, 3, 4:
		return 0
	case 5, 6, 7:
		return time.Duration(r.Int64N(int64(time.Millisecond)))
	case 8:
		return time.Duration(r.Int64N(2) * r.Int64N(int64(latest)))
	default:
		return time.Duration(r.Int64N(int64(latest)))
	}
}

// holdAll holds all frames of a type back, or not any more.
func (d *disorder) holdAll(typ wire.Type, long time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all[typ] = long
}

// alloc gives no memory to the engine of a rank that is to run short of it.
func (d *disorder) alloc(rank, n int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.starving[rank] {
		return nil
	}
	return make([]byte, n)
}

// starve has this rank's engine get no memory from now on, or get it again.
func (a *act) starve(now bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.starving[a.rank] = now
}

// listener is a log that keeps what nodes say of peers that break the protocol.
type listener struct {
	zapcore.LevelEnabler
	d *disorder
}

// With implements zapcore.Core.
func (l listener) With([]zapcore.Field) zapcore.Core { return l }

// Check implements zapcore.Core.
func (l listener) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return checked.AddCore(e, l)
}

// Write implements zapcore.Core.
func (l listener) Write(e zapcore.Entry, fields []zapcore.Field) error {
	for _, f := range fields {
		if err, is := f.Interface.(error); is {
			l.d.hears(e.Message, err)
		}
	}
	return nil
}

// Sync implements zapcore.Core.
func (l listener) Sync() error { return nil }

// hears judges the error of a line in a log. Only the connections of a rank that is killed break off.
func (d *disorder) hears(message string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if violation(err) || message == "connection lost" && !d.kills() {
		d.broken = append(d.broken, fmt.Sprintf("%s: %v", message, err))
	}
}

// kills reports whether the story has a rank that is killed.
func (d *disorder) kills() bool {
	return slices.ContainsFunc(d.story, func(round []scene) bool { return round[len(round)-1].name == killing })
}

// violation reports whether an error is about a frame that its receiver did not expect, and not about a connection.
func violation(err error) bool {
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.EPIPE, syscall.ECONNRESET, syscall.ECONNABORTED} {
		if errors.Is(err, end) {
			return false
		}
	}
	return slices.ContainsFunc([]string{"frame from rank", "sends a", "bad "}, func(s string) bool { return strings.Contains(err.Error(), s) })
}

// run has every rank play the story.
func (d *disorder) run() {
	var all sync.WaitGroup
	for rank := range d.Workers {
		all.Go(func() {
			if err := d.play(rank); err != nil {
				d.T.Errorf("rank %d: %v", rank, err)
				d.watch.Kill(nodeName(rank)) // so that the others end
				d.Leave(rank)
			}
		})
	}
	all.Wait()
	d.Shutdown()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, text := range d.broken {
		d.T.Error(text)
	}
}

func (d *disorder) play(rank int) error {
	for i, round := range d.story {
		d.watch.Revive(nodeName(rank))
		if err := d.StartRank(rank); err != nil {
			return fmt.Errorf("init %d: %w", i, err)
		}
		for k, s := range round {
			a := &act{disorder: d, rank: rank, id: fmt.Sprint(i, ".", k)}
			a.shared, a.own = d.random("shared ", a.id), d.random("own ", a.id, " ", rank)
			a.pause()
			if err := s.play(a); err != nil {
				return fmt.Errorf("round %d, scene %d of %v: %w", i, k, names(round), err)
			}
		}
		<-d.Leave(rank)
	}
	return nil
}

func names(round []scene) (list []string) {
	for _, s := range round {
		list = append(list, s.name)
	}
	return list
}
