package condition

// ASP is the asynchronous model: a pull is always answered at once (FluentPS Table III, row ASP).
// The setting is "asp".
func ASP() Model { return Model{Name: "asp", Pull: Always{}, Push: EveryLive{}} }

func newASP(a *Arguments) (Model, error) { return a.End(ASP()) }

// Always holds.
type Always struct{}

// Holds implements PullCondition.
func (Always) Holds(View) bool { return true }

// Ahead implements PullCondition.
func (Always) Ahead() bool { return true }

// Narrow implements Narrow.
func (Always) Narrow() bool { return true }

func (Always) String() string { return "always" }
