package worker

import "time"

const (
	// gatherBytes is how many bytes of input are held at most: larger batches bring no gain. Where a job is
	// crowded that holds from crowdedBytes on, since an exchange beside computing only takes its time.
	gatherBytes  = 1 << 20
	crowdedBytes = 16 << 20
	// gatherFor bounds how long an operation is held for a program that waits for nothing, or for answers that do not come
	// because other ranks begin with other tensors.
	gatherFor = 10 * time.Millisecond
)

// gather holds sums back while earlier ones are under way, so that what becomes ready meanwhile travels, is added and is
// answered as one batch, with one wake-up at each end. What is held leaves
//
//  1. at once, or with the last answer, while nothing else is under way: then the servers wait for it;
//  2. when it has gatherBytes;
//  3. when the program waits for it (Flush, Op.AtOnce);
//  4. after gatherFor.
//
// Where the job is crowded, its processes leaving no core free, to begin early gains nothing: each exchange takes its time
// from a rank that computes. There 1 holds only for operations for whose end nobody will wait.
//
// Priorities make no difference: in backward each tensor is more urgent than the one before, and none would be held. They decide from then on.
//
// Ranks need not agree on any of it. It has no lock: the engine keeps it behind its own.
type gather struct {
	crowded  bool
	held     []*operation
	bytes    int
	hurry    bool // nobody will wait for one of those that are held
	awaited  bool // the program waits
	underWay int  // operations that have left and not ended
	spare    []*operation

	reported Gathering
	since    time.Time   // the first of them was held
	timer    *time.Timer // nil before the first
	timed    bool        // the timer runs
}

// Gathering is what becomes of sums that are submitted.
type Gathering struct {
	Bytes int  // how many the next ones may have to be held; 0: they leave at once
	Held  bool // some are held: Flush releases them
}

func (g *gather) state() (s Gathering) {
	if g.crowded || g.underWay > 0 {
		s.Bytes = g.most()
	}
	s.Held = len(g.held) > 0
	return s
}

func (g *gather) most() int {
	if g.crowded {
		return crowdedBytes
	}
	return gatherBytes
}

// add holds an operation.
func (g *gather) add(o *operation) {
	o.gathered = true
	g.held = append(g.held, o)
	g.bytes += len(o.Input)
	g.hurry, g.awaited = g.hurry || o.Unwaited, g.awaited || o.AtOnce
}

// due gives what leaves now, without the program's waiting for it.
func (g *gather) due() []*operation {
	if g.awaited || g.bytes >= g.most() || len(g.held) > 0 && g.underWay == 0 && (g.hurry || !g.crowded) {
		return g.release()
	}
	return nil
}

// release gives everything. The list is the caller's until done.
func (g *gather) release() []*operation {
	ops := g.held
	g.underWay += len(ops)
	g.held, g.spare, g.bytes, g.hurry, g.awaited = g.spare[:0], nil, 0, false, false
	return ops
}

// done takes a list back that was released.
func (g *gather) done(ops []*operation) {
	clear(ops)
	g.spare = ops
}

// ended notes that an operation has ended.
func (g *gather) ended(o *operation) {
	if o.gathered {
		g.underWay--
	}
}

// gathers reports whether an operation is one that may be held: those that every rank brings and gets.
func (o *operation) gathers() bool { return o.Kind.Reduces() && !o.deferred }

// Flush has what is held leave. Where the caller waits for its operations, and has nothing else to do, large tensors too
// leave on its thread, as far as the connections take them.
func (e *Engine) Flush(waits bool) {
	e.mu.Lock()
	ops := e.leaving(e.gather.release())
	e.mu.Unlock()
	e.together(ops, waits)
}

// leaving says, while nothing else may be released, that a batch is about to be launched: an engine that ends waits for it.
func (e *Engine) leaving(ops []*operation) []*operation {
	if len(ops) > 0 {
		e.batches.Add(1)
	}
	e.holding()
	return ops
}

// together launches operations, and has what they send leave together.
func (e *Engine) together(ops []*operation, waits bool) {
	if len(ops) == 0 {
		return
	}
	defer e.batches.Done()
	e.corked.Add(1)
	for _, o := range ops {
		o.launch()
	}
	e.corked.Add(-1)
	e.kick(waits)
	e.mu.Lock()
	e.gather.done(ops)
	e.mu.Unlock()
}

// kick has every way send what waits, other processes first: they have the longer way.
func (e *Engine) kick(waits bool) {
	var here way
	e.each(func(w way) {
		if _, local := w.(*localQueue); local {
			here = w
			return
		}
		w.kick(waits)
	})
	if here != nil {
		here.kick(waits)
	}
}

// holding tells the user what becomes of operations, and sees to it that those which are held leave in time.
func (e *Engine) holding() {
	g := &e.gather
	is := g.state()
	if is == g.reported {
		return
	}
	news := is.Held && !g.reported.Held
	g.reported = is
	if e.cfg.Gathering != nil {
		e.cfg.Gathering(is)
	}
	if !news {
		return
	}
	switch g.since = time.Now(); {
	case g.timer == nil:
		g.timer = time.AfterFunc(gatherFor, e.overdue)
	case !g.timed:
		g.timer.Reset(gatherFor)
	}
	g.timed = true
}

// overdue releases what has been held for long. The timer runs on when nothing is held: to stop it each time would cost more.
func (e *Engine) overdue() {
	e.mu.Lock()
	g := &e.gather
	g.timed = false
	var ops []*operation
	switch left := gatherFor - time.Since(g.since); {
	case !g.reported.Held:
	case left > 0:
		g.timed = true
		g.timer.Reset(left)
	default:
		ops = e.leaving(g.release())
	}
	e.mu.Unlock()
	e.together(ops, false)
}

// stop gives back what is held when the engine ends.
func (g *gather) stop() []*operation {
	if g.timer != nil {
		g.timer.Stop()
	}
	return g.release()
}
