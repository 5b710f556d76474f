package worker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// end stops the engine: connections are closed, and once nobody touches their memory any more the
// operations in flight end with err. It returns at once; ended is closed when all is settled.
func (e *Engine) end(err error) {
	e.mu.Lock()
	if e.broken == nil {
		e.broken = err
	}
	err = e.broken
	e.mu.Unlock()
	e.settle.Do(func() {
		go func() {
			e.declares.stop(e, err)
			e.cancel()
			e.starts.Wait()
			e.passOn()
			e.each(way.close)
			e.wg.Wait()
			held := e.unhold() // first: what fails is looked for among what is held, of which there may be a million
			for _, o := range e.operations() {
				o.fail(e.explain(o, err))
			}
			for _, o := range held {
				o.launch() // which only ends it: it has failed
			}
			e.batches.Wait()
			e.untold.Wait() // those that other threads have begun to end, or are about to launch
			e.encoder.close()
			e.abandonStaging()
			e.joinFails(-1, err)
			e.untoldJoin.Wait()
			e.StopTimeline()
			close(e.ended)
		}()
	})
}

// farewellTime bounds how long an engine that ends for a lost peer waits until the others have heard why.
const farewellTime = 500 * time.Millisecond

// passOn tells the servers of the lost peer for which this engine ends, so that nobody mistakes the
// closing of its connections, or of those to the server in this process, for the loss.
func (e *Engine) passOn() {
	lost := e.loss()
	if lost == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), farewellTime)
	defer cancel()
	e.lastWords(ctx, func(w way) []chan struct{} { return w.lost(*lost) })
}

// loss is the lost peer for which this engine ends, nil if it does not end for one.
func (e *Engine) loss() *wire.Lost {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.lost
}

// explain adds to the reason of an end which tensor waited, on which rank.
func (e *Engine) explain(o *operation, err error) error {
	return fmt.Errorf("%s on rank %d: %w", o.what(), e.cfg.Rank, err)
}

// operations are those in flight, and the sums of this host. They are lent, and never handed back: the engine ends.
func (e *Engine) operations() []*operation {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lent++
	return slices.AppendSeq(slices.AppendSeq(make([]*operation, 0, len(e.inflight)+len(e.climbs)), maps.Keys(e.inflight)), maps.Keys(e.climbs))
}

// Shutdown says goodbye to the servers and ends what is in flight. It waits for that until ctx ends.
func (e *Engine) Shutdown(ctx context.Context) {
	e.mu.Lock()
	alive := e.broken == nil
	if alive {
		e.broken = because{ErrShutdown, fmt.Sprintf("the engine of rank %d was shut down", e.cfg.Rank)}
	}
	err := e.broken
	e.mu.Unlock()
	if alive {
		for _, o := range e.operations() {
			o.giveUp(e.explain(o, err))
		}
		e.goodbye(ctx)
	}
	e.end(err)
	<-e.ended
}

// meetTime is how long a worker that leaves connects to servers that are just joining.
const meetTime = 5 * time.Second

// goodbye tells every server that this worker leaves. The servers close the connections when they have
// read it: if this end closed one on which a report of theirs is on its way, what is still to be read
// there would be lost.
func (e *Engine) goodbye(ctx context.Context) {
	met, cancel := context.WithTimeout(ctx, meetTime)
	e.met(met) // a server that is met later would not hear it
	cancel()
	e.lastWords(ctx, way.bye)
	closed := make(chan struct{})
	go func() {
		e.wg.Wait()
		close(closed)
	}()
	select {
	case <-closed:
	case <-ctx.Done():
	}
}

// lastWords has every way say its last word and waits until that has left.
func (e *Engine) lastWords(ctx context.Context, say func(way) []chan struct{}) {
	var said []chan struct{}
	e.each(func(w way) { said = append(said, say(w)...) })
	for _, s := range said {
		select {
		case <-s:
		case <-ctx.Done():
			return
		}
	}
}
