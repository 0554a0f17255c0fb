-- Give up an attempt: leave the queue, give back a grant that has come meanwhile, and refuse a command that is
-- still on its way; all in one step.
--
-- KEYS  1 lock  2 ended attempts  3 queue  4 alive
-- ARGV  1 token  2 how long the attempt is known to have ended, ms  3 how many such attempts are known
--
-- Returns 1 released, 0 it held nothing.

local refused
local function try(...) -- a foreign key is no reason to leave the others as they are; a refusal is one to try again
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then refused = refused or reply end
end

local taken = 0
try('ZREM', KEYS[3], ARGV[1])
try('ZREM', KEYS[4], ARGV[1])
if try('GET', KEYS[1]) == ARGV[1] then
  try('DEL', KEYS[1])
  taken = 1
end
local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
local life = math.max(redis.call('PTTL', KEYS[2]), ARGV[2])
redis.call('PEXPIRE', KEYS[2], life) -- if this right is missing, nothing is to be left without an end
try('ZADD', KEYS[2], string.format('%.0f', ms + ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[2], life)
try('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
return refused or taken
