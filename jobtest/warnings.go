package jobtest

import (
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Warnings receives the warnings that the workers log.
func Warnings(into chan<- string) Option {
	return func(j *Job) {
		j.Log = zap.New(zapcore.NewNopCore(), zap.WrapCore(func(zapcore.Core) zapcore.Core {
			return zapcore.RegisterHooks(onlyWarnings{}, func(e zapcore.Entry) error {
				select {
				case into <- e.Message:
				default: // the channel is full, and the test needs no more
				}
				return nil
			})
		}))
	}
}

// onlyWarnings is a core without state.
type onlyWarnings struct{}

func (onlyWarnings) Enabled(l zapcore.Level) bool { return l == zapcore.WarnLevel }

func (c onlyWarnings) With([]zapcore.Field) zapcore.Core { return c }

func (onlyWarnings) Write(zapcore.Entry, []zapcore.Field) error { return nil }

func (onlyWarnings) Sync() error { return nil }

func (c onlyWarnings) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

// Hears waits for a warning that has all of the texts.
func (j *Job) Hears(heard <-chan string, texts ...string) {
	j.T.Helper()
	timeout := time.After(Hang)
	for {
		select {
		case line := <-heard:
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
				return
			}
		case <-timeout:
			j.T.Fatalf("no warning with %q", texts)
		}
	}
}
