package transporttest

import (
	"math/rand/v2"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

const peerTimeout = 8 * time.Second

// forLong is onALink for as long as the test takes.
func forLong(t *testing.T, o Options, test func(w wired)) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork(o)
		t.Cleanup(n.Close)
		b := &bench{t, Backend{Address: "b:7"}}
		l := b.listen(n.Node("b", secret))
		x, err := n.Node("a", secret).Dial(t.Context(), "b:7")
		b.must(err)
		t.Cleanup(func() { x.Close() })
		y, err := l.Accept()
		b.must(err)
		t.Cleanup(func() { y.Close() })
		test(wired{b, n, x, y})
	})
}

// watched runs a test with an idle connection whose ends are read. lost has the error of each end: a, then b.
func watched(t *testing.T, test func(w wired, lost []chan error)) {
	forLong(t, Options{PeerTimeout: peerTimeout}, func(w wired) {
		test(w, []chan error{w.startReading(w.a), w.startReading(w.b)})
	})
}

func (w wired) lives(lost []chan error) {
	w.Helper()
	synctest.Wait()
	for i, l := range lost {
		select {
		case err := <-l:
			w.Errorf("end %d of the connection is lost: %v", i, err)
		default:
		}
	}
}

func TestAPeerThatIsStoppedForNoMoreThanTheToleranceIsKept(t *testing.T) {
	watched(t, func(w wired, lost []chan error) {
		for range 50 {
			time.Sleep(530 * time.Millisecond) // so that the stops begin at different times between two beats
			w.script("at 0s b stop")
			w.send(w.a, 1, 0, 1000)
			time.Sleep(stream.Tolerance(peerTimeout))
			w.script("at 0s b continue")
			w.lives(lost)
		}
	})
}

func TestAPeerThatIsStoppedForLongIsLostToBothSides(t *testing.T) {
	watched(t, func(w wired, lost []chan error) {
		time.Sleep(time.Minute + time.Duration(rand.Int64N(int64(peerTimeout))))
		w.script("at 0s b stop")
		stopped := time.Now()
		w.wantError(<-lost[0], os.ErrDeadlineExceeded, "b:7 has been silent for 5.25s: its process is stopped")
		if took := time.Since(stopped); took < stream.Tolerance(peerTimeout) || took > stream.Silence(peerTimeout) {
			t.Errorf("it was noticed after %v", took)
		}
		w.wantError(w.a.Send(buffers(frame(1, 0, 10))), os.ErrDeadlineExceeded, "b:7 has been silent")
		time.Sleep(time.Minute)
		select {
		case err := <-lost[1]:
			t.Errorf("the process that is stopped notices: %v", err)
		default:
		}
		w.script("at 0s b continue")
		w.wantError(<-lost[1], transport.ErrStopped, "this process itself did not run for 1m")
	})
}

func TestTimeInWhichAProcessIsStoppedItselfDoesNotCountAsItsPeersSilence(t *testing.T) {
	watched(t, func(w wired, lost []chan error) {
		w.script("at 0s a stop\nat 1s b stop\nat 60s b continue\nat 61s a continue")
		time.Sleep(2 * time.Minute)
		w.lives(lost)
	})
}

func TestAReaderThatIsBusyForLongDoesNotLoseItsPeer(t *testing.T) {
	forLong(t, Options{PeerTimeout: peerTimeout}, func(w wired) {
		reading := w.startReading(w.a)
		for i := range 3 {
			w.send(w.a, 1, i, 1000)
			w.expect(w.b, 1, i, 1000)
			time.Sleep(5 * peerTimeout) // what the frame asks for takes long
		}
		w.lives([]chan error{reading})
	})
}

func TestALongPayloadIsNoSilence(t *testing.T) {
	forLong(t, Options{PeerTimeout: peerTimeout, Bandwidth: 10_000}, func(w wired) {
		reading := w.startReading(w.a)
		go w.send(w.a, 1, 0, 1_000_000) // 100 s
		w.expect(w.b, 1, 0, 1_000_000)
		w.lives([]chan error{reading})
	})
}

func TestBeatsAreSentOnlyWhereNothingElseIsAndStayFew(t *testing.T) {
	watched(t, func(w wired, _ []chan error) {
		passed := func() int64 {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.traffic.link(path{"a", "b"}).all.passed
		}
		before := passed()
		time.Sleep(10 * peerTimeout)
		if n := (passed() - before) / header; n < 80 || n > 160 {
			t.Errorf("%d beats in ten peer timeouts", n)
		}
		before = passed()
		const sends = 1000
		for i := range sends {
			time.Sleep(peerTimeout / 100)
			w.send(w.a, 1, i, 0)
		}
		if n := (passed()-before)/header - sends; n > 1 { // before the first
			t.Errorf("%d beats beside a frame in each hundredth of the timeout", n)
		}
	})
}
