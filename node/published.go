package node

import (
	"os"
	"path/filepath"
	"unicode/utf8"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/runfile"
	"github.com/paceline/paceline/node/settings"
)

// Publish has `paceline status` find the job, until Withdraw or Close. A job that cannot be listed runs all the same:
// status itself says what is wrong with the directory.
func (s *Scheduler) Publish() {
	if s.file != nil {
		return
	}
	dir, _ := os.Getwd() // "" where it has gone
	var err error
	s.file, err = runfile.Publish(runfile.Job{Scheduler: s.Address, Command: os.Args, Directory: dir, Env: reachedBy(&s.settings, s.Address)})
	if err != nil {
		s.log.Info("`paceline status` does not find this job by itself", zap.String("scheduler", s.Address), zap.Error(err))
	}
}

// Withdraw ends Publish.
func (s *Scheduler) Withdraw() {
	if s.file != nil {
		s.file.Remove()
		s.file = nil
	}
}

// Close ends the scheduler. Another one can listen at its address when Close returns.
func (s *Scheduler) Close() error {
	s.Withdraw()
	s.profiles.close()
	err := s.Scheduler.Close()
	_ = s.listener.Close() // which Serve, in its goroutine, may not have seen yet
	return err
}

// reachedBy is the environment by which another process of this machine reaches a scheduler.
func reachedBy(s *settings.Settings, address string) map[string]string {
	env := map[string]string{"PACELINE_SCHEDULER": address}
	file := s.SecretFile
	if utf8.Valid(s.JobSecret) { // as JSON's text has to be
		file, env["PACELINE_JOB_SECRET"] = "", string(s.JobSecret)
	}
	for name, path := range map[string]string{"PACELINE_JOB_SECRET_FILE": file, "PACELINE_TLS_CERT": s.TLSCert, "PACELINE_TLS_KEY": s.TLSKey, "PACELINE_TLS_CA": s.TLSCA} {
		if path == "" {
			continue
		}
		if whole, err := filepath.Abs(path); err == nil {
			path = whole
		}
		env[name] = path
	}
	return env
}
