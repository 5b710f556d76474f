package jobtest_test

import (
	"strings"
	"testing"

	"github.com/paceline/paceline/jobtest"
)

func TestAJobOverSeveralHosts(t *testing.T) {
	f := jobtest.MakeHosts(t, 4).Fleet(3, 1)
	f.Steps()
}

func TestAHostThatIsCutOffIsAnErrorOnEveryRankSoon(t *testing.T) {
	t.Parallel() // its time passes without work
	t.Run("a worker's", func(t *testing.T) {
		t.Parallel()
		h := jobtest.MakeHosts(t, 3)
		f := h.Fleet(3, 0)
		h.Unplug(1)
		cut := f.Workers[1]
		f.Workers[1] = nil
		f.Fails("worker 1")
		if err := cut.Failure(); !strings.HasPrefix(err, "error: peer lost") && !strings.Contains(err, "peer lost") {
			t.Errorf("the rank that was cut off: %q", err)
		}
	})
	t.Run("a server's", func(t *testing.T) {
		t.Parallel()
		h := jobtest.MakeHosts(t, 3)
		f := h.Fleet(2, 1)
		h.Unplug(2)
		f.Fails("server ")
	})
}
