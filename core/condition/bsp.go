package condition

// BSP is the bulk synchronous model: a pull waits until its iteration is closed, and an iteration is
// closed when every live rank has pushed it (FluentPS Table III, row BSP).
func BSP() Model { return Model{Name: "bsp", Pull: Closed{}, Push: EveryLive{}} }

func newBSP(a *Arguments) (Model, error) { return a.End(BSP()) }

// Closed holds when the pull's own iteration is closed: i < V.
type Closed struct{}

// Holds implements PullCondition.
func (Closed) Holds(v View) bool { return v.Progress < v.V }

// Ahead implements PullCondition.
func (Closed) Ahead() bool { return false }

// Bound implements Bounded.
func (Closed) Bound() (uint64, bool) { return 0, true }

// Narrow implements Narrow.
func (Closed) Narrow() bool { return true }

func (Closed) String() string { return "i < V" }

// EveryLive holds when every live rank has pushed the open iteration: count[V] == N.
type EveryLive struct{}

// Holds implements PushCondition.
func (EveryLive) Holds(v View) bool { return v.Count(v.V) == v.N }

// Quorum implements Quorum.
func (EveryLive) Quorum(n int) int { return n }

// Whole implements Whole.
func (EveryLive) Whole() bool { return true }

func (EveryLive) String() string { return "count[V] == N" }
