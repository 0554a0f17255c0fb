package client

import (
	"errors"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"
)

// ErrAway is the error of a command that is not sent, or not waited for, because the breaker is open.
var ErrAway = errors.New("redis does not answer")

// Unreachable reports whether the server cannot answer anything now. A server that refuses a
// command is reachable. A redirection counts as unreachable: the client has followed as many as it
// may, or does not follow it, since a slot is being moved or its master replaced.
func Unreachable(err error) bool {
	if _, refused := errors.AsType[redis.Error](err); !refused || err == redis.Nil { // as most misses have it
		return err != nil && !refused
	}
	return redis.IsLoadingError(err) || redis.IsClusterDownError(err) || redis.IsMasterDownError(err) ||
		redis.IsTryAgainError(err) || redis.IsMaxClientsError(err) || redis.HasErrorPrefix(err, "BUSY ") || Redirected(err)
}

// Refused reports whether a server that could answer has refused a command.
func Refused(err error) bool {
	_, refused := errors.AsType[redis.Error](err)
	return refused && !Unreachable(err)
}

// Redirected reports whether a server of a Cluster has sent the command to another one.
func Redirected(err error) bool {
	_, moved := redis.IsMovedError(err)
	_, asked := redis.IsAskError(err)
	return moved || asked
}

type unsent struct{ error }

func (e unsent) Unwrap() error { return e.error }

// Unsent reports whether err is of a command that was not sent, and never will be.
func Unsent(err error) bool { return errors.As(err, new(unsent)) }

// isLost reports whether a command had no answer, and may have been executed, or may still be.
func isLost(err error) bool { return Unreachable(err) && MayHaveRun(err) }

// MayHaveRun reports whether a command that failed may have been executed, or may still be.
func MayHaveRun(err error) bool {
	if err == nil || Unsent(err) {
		return false
	}
	if errors.Is(err, ErrAway) { // with the error of the command that has opened the breaker
		return true
	}
	_, reply := errors.AsType[redis.Error](err)
	op, _ := errors.AsType[*net.OpError](err)
	return !reply && !errors.Is(err, redis.ErrClosed) && !errors.Is(err, redis.ErrPoolTimeout) && (op == nil || op.Op != "dial")
}

// Unknown reports whether the server does not know the script of an EVALSHA that failed with err.
func Unknown(err error) bool { return err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") }

// ScriptsRefused reports whether the server runs no scripts for this user, or none at all. Nothing
// has been executed then. A right that is missing inside a script is another case: that reply may
// follow writes.
func ScriptsRefused(err error) bool {
	return err != nil && (strings.HasPrefix(err.Error(), "NOPERM") || strings.HasPrefix(err.Error(), "ERR unknown command"))
}

// WrongType reports whether a key holds something other than a string.
func WrongType(err error) bool {
	return err != nil && strings.HasPrefix(err.Error(), "WRONGTYPE")
}
