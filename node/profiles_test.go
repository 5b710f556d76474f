package node

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/node/settings"
)

func TestEveryRoleOpensItsProfilesOnAPortOfItsOwn(t *testing.T) {
	seen, said := observer.New(zap.WarnLevel)
	o := Options{Log: zap.New(seen)}
	as := func(role string) settings.Settings {
		env := map[string]string{"PACELINE_ROLE": role, "PACELINE_JOB_SECRET": "a secret for this test only", "PACELINE_PPROF": "0", "PACELINE_SCHEDULER": "127.0.0.1:1"}
		s, _, err := settings.FromEnv(env)
		if err != nil {
			t.Fatal(err)
		}
		s.Servers, s.NumServers = "dedicated", 1
		if said.Len() > 0 {
			address, _ := said.All()[0].ContextMap()["at"].(string)
			s.Pprof = strings.TrimSuffix(strings.TrimPrefix(address, "http://"), "/debug/pprof/")
		}
		return s
	}
	sched, err := StartScheduler(as("scheduler"), "127.0.0.1:0", o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func(s settings.Settings) {
		s.Scheduler = sched.Address
		ended <- RunServer(ctx, s, "", o)
	}(as("server"))
	s := as("worker")
	s.Scheduler = sched.Address
	w, err := StartWorker(ctx, s, o)
	if err != nil {
		t.Fatal(err)
	}
	if said.Len() != 3 {
		t.Fatal(said.All())
	}
	urls := map[string]bool{}
	for _, entry := range said.All() {
		url, _ := entry.ContextMap()["at"].(string)
		urls[url] = true
		if page := get(t, url+"goroutine?debug=1", ""); !strings.Contains(page, "goroutine profile:") {
			t.Errorf("%s: %s", url, page)
		}
		if page := get(t, url, "paceline.example:80"); !strings.Contains(page, "403") {
			t.Errorf("%s as another site's: %s", url, page)
		}
	}
	if len(urls) != 3 {
		t.Errorf("the endpoints share addresses: %v", urls)
	}
	w.Shutdown()
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := sched.Close(); err != nil {
		t.Error(err)
	}
	for url := range urls {
		if _, err := http.Get(url); err == nil {
			t.Errorf("%s answers after its process's role has ended", url)
		}
	}
}

// get returns a page and its status. host: what the request names; "" for the URL's own.
func get(t *testing.T, url, host string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	page, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status + "\n" + string(page)
}
