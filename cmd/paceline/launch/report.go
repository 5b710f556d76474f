package launch

// Report is how a job went.
type Report struct {
	Command []string  `json:"command"`
	Code    int       `json:"exit_code"`
	Seconds float64   `json:"seconds"`
	Ranks   int       `json:"ranks"`           // of an elastic job those of its last round
	Lost    []Failure `json:"lost"`            // without which an elastic job went on
	Failed  []Failure `json:"failed"`          // that ended the job, the first one first; those who failed by themselves before they were stopped
	Error   string    `json:"error,omitempty"` // why the job ended, where no process's failure did
}

// Failure is a process that has failed.
type Failure struct {
	Name string `json:"name"`           // "rank 3", "server host2", "process 5" of an elastic job
	Rank *int   `json:"rank,omitempty"` // of a worker whose rank stays
	Host string `json:"host"`
	PID  int64  `json:"pid,omitempty"` // 0: it never ran
	Code int    `json:"exit_code"`     // 0 of a server that was not started here: not known
	Why  string `json:"why"`
}

// failure is how a task failed; p is nil where it was never started.
func failure(t *Task, p *process, code int, why string) Failure {
	f := Failure{Name: t.Name, Rank: t.Rank, Host: t.Host, Code: code, Why: why}
	if p != nil {
		f.PID = max(p.pid.Load(), 0)
	}
	return f
}
